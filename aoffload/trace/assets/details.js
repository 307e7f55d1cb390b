// The details of a request or a job, beside the pointer and below the panels. Text only, never markup.

const FACT_NAMES = {
  num_tokens: "prompt tokens",
  num_device_tokens: "prompt tokens found on the device",
  num_host_tokens: "prompt tokens found in host memory",
  num_disk_tokens: "prompt tokens found on disk",
  num_blocks: "blocks allocated",
  num_ready_tokens: "tokens ready when it began to compute",
  num_lost_tokens: "tokens that a load failed to bring",
  num_computed_tokens: "tokens committed",
  num_pending: "times told to ask again",
  num_kept_blocks: "blocks that a step still held when it ended",
  num_declined_tokens: "tokens computed, because that was faster than to load or fetch them",
  num_skipped_fetches: "fetches skipped, because the tier fails",
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

// What it does in a state, and the name of the state in the log.
function stateText(trace, state) {
  return trace.states[state] ? `${trace.states[state]} (${state})` : state;
}

function timelineTip(trace, timeline, atS) {
  const { timelines } = trace;
  const whole = timelines.stopS[timeline] - timelines.startS[timeline];
  const now = intervalsOf(trace, timeline).find((interval) => interval.startS <= atS && atS <= interval.stopS);
  const facts = factsOf(trace, timeline);
  const lines = [timelineTitle(trace, timeline)];
  if (now) lines.push(`${stateText(trace, now.state)} for ${durationText(now.stopS - now.startS)}, from ${timeText(now.startS)}`);
  lines.push(`${durationText(whole)} in all, ${outcomeText(trace, timeline)}`);
  if ("num_tokens" in facts) {
    const { num_tokens: tokens, num_device_tokens: device, num_host_tokens: host, num_disk_tokens: disk } = facts;
    lines.push(`${countText(tokens, "token")}: ${device} on the device, ${host} in host memory${disk ? `, ${disk} on disk` : ""}`);
  }
  if ("num_blocks" in facts) lines.push(countText(facts.num_blocks, "block"));
  lines.push(runtimeName(trace, timelines.runtime[timeline]));
  return lines.join("\n");
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

// A table. `columns` are pairs: the header, and whether the column has numbers. A cell is text or an element.
function table(columns, rows) {
  const made = element("table");
  const fill = (line, tag, cells) => {
    cells.forEach((cell, at) => {
      const made = element(tag, undefined, columns[at][1] ? "number" : "");
      if (tag === "th") made.scope = "col";
      made.append(cell);
      line.append(made);
    });
  };
  fill(made.createTHead().insertRow(), "th", columns.map(([header]) => header));
  const body = made.createTBody();
  for (const row of rows) fill(body.insertRow(), "td", row);
  return made;
}

function linkButton(text, clicked) {
  const button = element("button", text);
  button.type = "button";
  button.addEventListener("click", clicked);
  return button;
}

function showTimeline(panel, trace, timeline, closed) {
  const { timelines } = trace;
  const whole = timelines.stopS[timeline] - timelines.startS[timeline];
  const heading = element("h2", `${timelineTitle(trace, timeline)} `);
  const when = `from ${timeText(timelines.startS[timeline])} for ${durationText(whole)}, ${runtimeName(trace, timelines.runtime[timeline])}`;
  heading.append(element("small", `${outcomeText(trace, timeline)}; ${when}`));
  const columns = element("div", undefined, "columns");
  columns.append(statesTable(trace, timeline, whole), factsTable(trace, timeline), jobsTable(trace, timeline));
  panel.replaceChildren(linkButton("close (Esc)", closed), heading, columns);
  panel.hidden = false;
}

function statesTable(trace, timeline, whole) {
  const intervals = intervalsOf(trace, timeline);
  const { unit, texts } = durationColumn(intervals.map(({ startS, stopS }) => stopS - startS));
  const rows = intervals.map(({ state, startS, stopS }, at) => {
    return [stateText(trace, state), timeText(startS), texts[at], whole ? ((100 * (stopS - startS)) / whole).toFixed(1) : "0.0"];
  });
  rows.push([trace.words[trace.timelines.outcome[timeline]], timeText(trace.timelines.stopS[timeline]), "", ""]);
  return table([["state", false], ["from (UTC)", true], [`for (${unit})`, true], ["share (%)", true]], rows);
}

function factsTable(trace, timeline) {
  const rows = Object.entries(factsOf(trace, timeline)).map(([fact, count]) => [FACT_NAMES[fact], numberText(count)]);
  return rows.length ? table([["counted", false], ["number", true]], rows) : "";
}

function jobsTable(trace, timeline) {
  const { jobs } = trace;
  const found = trace.jobsByTimeline.get(trace.timelines.number[timeline]) || [];
  if (!found.length) return element("p", "no copies of its own", "soft");
  const shown = found.slice(0, MOST_JOBS);
  const { unit, texts } = durationColumn(shown.map((job) => jobs.ended_s[job] - jobs.launched_s[job]));
  const rows = shown.map((job, at) => [
    String(jobs.job_id[job]),
    trace.links[jobs.link[job]].name,
    trace.words[jobs.outcome[job]],
    timeText(jobs.launched_s[job]),
    texts[at],
    numberText(jobs.num_blocks[job]),
  ]);
  const title = found.length > MOST_JOBS ? `job (the first ${MOST_JOBS} of ${found.length})` : "job";
  const columns = [[title, true], ["copy", false], ["outcome", false], ["launched (UTC)", true], [`took (${unit})`, true], ["blocks", true]];
  return table(columns, rows);
}
