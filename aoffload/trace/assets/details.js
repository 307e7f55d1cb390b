// The details of a request or a job, beside the pointer and below the panels. Text only, never markup.

const FACT_NAMES = {
  num_tokens: "prompt tokens",
  num_device_tokens: "of them on the device",
  num_host_tokens: "of them in host memory",
  num_disk_tokens: "of them on the disk",
  num_blocks: "blocks given",
  num_ready_tokens: "tokens ready when it began to compute",
  num_lost_tokens: "tokens not brought by a load",
  num_computed_tokens: "tokens committed",
  num_pending: "times told to ask again",
  num_kept_blocks: "blocks that a step still held at its end",
  num_declined_tokens: "tokens computed rather than loaded or fetched: that was sooner",
  num_skipped_fetches: "fetches skipped: the tier fails, and is left alone",
};
const MOST_JOBS = 200;

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function timelineTitle(trace, timeline) {
  const kind = trace.kinds[trace.timelines.kind[timeline]];
  return kind === "pin" || kind === "step" ? `${kind} ${trace.timelines.name[timeline]}` : trace.timelines.name[timeline];
}

function outcomeText(trace, timeline) {
  const reason = trace.words[trace.timelines.reason[timeline]];
  return trace.words[trace.timelines.outcome[timeline]] + (reason ? `: ${reason}` : "");
}

function runtimeName(trace, number) {
  return trace.runtimes[number - 1].name;
}

function timelineTip(trace, timeline, atS) {
  const { timelines } = trace;
  const whole = timelines.stopS[timeline] - timelines.startS[timeline];
  const now = intervalsOf(trace, timeline).find((interval) => interval.startS <= atS && atS <= interval.stopS);
  const facts = factsOf(trace, timeline);
  const lines = [timelineTitle(trace, timeline)];
  if (now) lines.push(`${now.state} for ${durationText(now.stopS - now.startS)}, from ${timeText(now.startS)}`);
  lines.push(`${durationText(whole)} in all, ${outcomeText(trace, timeline)}`);
  if ("num_tokens" in facts) {
    const { num_tokens: tokens, num_device_tokens: device, num_host_tokens: host, num_disk_tokens: disk } = facts;
    lines.push(`${countText(tokens, "token")}: ${device} on the device, ${host} in host memory${disk ? `, ${disk} on the disk` : ""}`);
  }
  if ("num_blocks" in facts) lines.push(countText(facts.num_blocks, "block"));
  lines.push(runtimeName(trace, timelines.runtime[timeline]));
  return lines.join("\n");
}

// The activity of an unfinished request, or the blocks that an open step holds.
function openText(trace, timeline) {
  const { timelines } = trace;
  const now = intervalsOf(trace, timeline).pop();
  const [title, blocks] = [timelineTitle(trace, timeline), factsOf(trace, timeline).num_blocks];
  if (isStep(trace, timeline)) return `${title}: holds ${countText(blocks, "block")}`;
  return now ? `${title}: ${now.state} for ${durationText(now.stopS - now.startS)}` : title;
}

// Reasons for stores that no request waits for, by destination tier.
const WHY_STORED = {
  host: "about to be evicted from the device",
  disk: "about to be evicted from host memory, or asked for twice",
  remote: "asked for twice",
};

function jobTip(trace, job) {
  const { jobs } = trace;
  const owner = ownerOf(trace, job);
  const lines = [`job ${jobs.job_id[job]}: ${trace.links[jobs.link[job]].name}, ${countText(jobs.num_blocks[job], "block")}`];
  lines.push(`${trace.words[jobs.outcome[job]]} after ${durationText(jobs.ended_s[job] - jobs.launched_s[job])}`);
  if (jobs.num_bytes[job]) lines.push(copyText(jobs, job));
  if (trace.words[jobs.error[job]]) lines.push(trace.words[jobs.error[job]]);
  lines.push(owner ? `for ${owner}` : `for no request: ${WHY_STORED[trace.links[jobs.link[job]].tier] || "it is stored in time"}`);
  return lines.join("\n");
}

function copyText(jobs, job) {
  const [bytes, seconds] = [jobs.num_bytes[job], jobs.copy_s[job]];
  return `${sizeText(bytes)} copied in ${durationText(seconds)}${seconds ? `, ${sizeText(bytes / seconds)}/s` : ""}`;
}

function ownerOf(trace, job) {
  const timeline = trace.timelineByNumber.get(trace.jobs.timeline[job]);
  return timeline === undefined ? trace.jobs.owner[job] : timelineTitle(trace, timeline);
}

function table(header, rows, numbersFrom) {
  const made = element("table");
  const first = made.insertRow();
  for (const text of header) first.append(element("th", text));
  for (const row of rows) {
    const line = made.insertRow();
    row.forEach((text, at) => line.append(element("td", text, at >= numbersFrom ? "number" : "")));
  }
  return made;
}

function showTimeline(panel, trace, timeline) {
  const { timelines } = trace;
  const whole = timelines.stopS[timeline] - timelines.startS[timeline];
  const heading = element("h2", `${timelineTitle(trace, timeline)} `);
  const when = `${timeText(timelines.startS[timeline])}, ${durationText(whole)}, ${runtimeName(trace, timelines.runtime[timeline])}`;
  heading.append(element("small", `${outcomeText(trace, timeline)} (${when})`));
  const columns = element("div", undefined, "columns");
  columns.append(statesTable(trace, timeline, whole), factsTable(trace, timeline), jobsTable(trace, timeline));
  panel.replaceChildren(heading, columns);
  panel.hidden = false;
}

function statesTable(trace, timeline, whole) {
  const rows = intervalsOf(trace, timeline).map(({ state, startS, stopS }) => {
    return [state, timeText(startS), durationText(stopS - startS), shareText(stopS - startS, whole)];
  });
  const { timelines, moves, words } = trace;
  const last = timelines.first[timeline + 1] - 1;
  rows.push([words[moves.state[last]], timeText(moves.at_s[last]), "", ""]);
  return table(["state", "from", "for", "share"], rows, 1);
}

function factsTable(trace, timeline) {
  const rows = Object.entries(factsOf(trace, timeline)).map(([fact, count]) => [FACT_NAMES[fact], count.toLocaleString("en")]);
  return table(["", ""], rows, 1);
}

function jobsTable(trace, timeline) {
  const { jobs } = trace;
  const found = trace.jobsByTimeline.get(trace.timelines.number[timeline]) || [];
  const rows = found.slice(0, MOST_JOBS).map((job) => [
    `${jobs.job_id[job]} ${trace.links[jobs.link[job]].name}`,
    trace.words[jobs.outcome[job]],
    timeText(jobs.launched_s[job]),
    durationText(jobs.ended_s[job] - jobs.launched_s[job]),
    countText(jobs.num_blocks[job], "block"),
  ]);
  const title = found.length > MOST_JOBS ? `job (the first ${MOST_JOBS} of ${found.length})` : "job";
  return rows.length ? table([title, "", "launched", "settled after", ""], rows, 2) : element("p", "no jobs of its own", "soft");
}
