// What is said about a request or a job: beside the pointer, and below the panels. Text only, never markup.

const FACT_NAMES = {
  num_tokens: "prompt tokens",
  num_device_tokens: "of them on the device",
  num_host_tokens: "of them in host memory",
  num_blocks: "blocks given",
  num_ready_tokens: "tokens ready when it began to compute",
  num_computed_tokens: "tokens committed",
};
const MOST_JOBS = 200;

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function storyTitle(trace, story) {
  const kind = trace.kinds[trace.stories.kind[story]];
  return kind === "pin" ? `pin ${trace.stories.name[story]}` : trace.stories.name[story];
}

function outcomeText(trace, story) {
  const reason = trace.words[trace.stories.reason[story]];
  return trace.words[trace.stories.outcome[story]] + (reason ? `: ${reason}` : "");
}

function runtimeName(trace, number) {
  return trace.runtimes[number - 1].name;
}

function storyTip(trace, story, atS) {
  const { stories } = trace;
  const whole = stories.stopS[story] - stories.startS[story];
  const now = intervalsOf(trace, story).find((interval) => interval.startS <= atS && atS <= interval.stopS);
  const facts = factsOf(trace, story);
  const lines = [storyTitle(trace, story)];
  if (now) lines.push(`${now.state} for ${durationText(now.stopS - now.startS)}, from ${timeText(now.startS)}`);
  lines.push(`${durationText(whole)} in all, ${outcomeText(trace, story)}`);
  if ("num_tokens" in facts) {
    const { num_tokens: tokens, num_device_tokens: device, num_host_tokens: host } = facts;
    lines.push(`${countText(tokens, "token")}: ${device} on the device, ${host} in host memory`);
  }
  if ("num_blocks" in facts) lines.push(countText(facts.num_blocks, "block"));
  lines.push(runtimeName(trace, stories.runtime[story]));
  return lines.join("\n");
}

function jobTip(trace, job) {
  const { jobs } = trace;
  const owner = ownerOf(trace, job);
  const lines = [`job ${jobs.job_id[job]}: ${trace.directions[jobs.direction[job]]} of ${countText(jobs.num_blocks[job], "block")}`];
  lines.push(`${trace.words[jobs.outcome[job]]} after ${durationText(jobs.ended_s[job] - jobs.launched_s[job])}`);
  if (jobs.num_bytes[job]) lines.push(copyText(jobs, job));
  if (trace.words[jobs.error[job]]) lines.push(trace.words[jobs.error[job]]);
  lines.push(owner ? `for ${owner}` : "for no request: about to be evicted");
  return lines.join("\n");
}

function copyText(jobs, job) {
  const [bytes, seconds] = [jobs.num_bytes[job], jobs.copy_s[job]];
  return `${sizeText(bytes)} copied in ${durationText(seconds)}${seconds ? `, ${sizeText(bytes / seconds)}/s` : ""}`;
}

function ownerOf(trace, job) {
  const story = trace.storyByNumber.get(trace.jobs.story[job]);
  return story === undefined ? trace.jobs.owner[job] : storyTitle(trace, story);
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

function showStory(panel, trace, story) {
  const { stories } = trace;
  const whole = stories.stopS[story] - stories.startS[story];
  const heading = element("h2", `${storyTitle(trace, story)} `);
  const when = `${timeText(stories.startS[story])}, ${durationText(whole)}, ${runtimeName(trace, stories.runtime[story])}`;
  heading.append(element("small", `${outcomeText(trace, story)} (${when})`));
  const columns = element("div", undefined, "columns");
  columns.append(statesTable(trace, story, whole), factsTable(trace, story), jobsTable(trace, story));
  panel.replaceChildren(heading, columns);
  panel.hidden = false;
}

function statesTable(trace, story, whole) {
  const rows = intervalsOf(trace, story).map(({ state, startS, stopS }) => {
    return [state, timeText(startS), durationText(stopS - startS), shareText(stopS - startS, whole)];
  });
  const { stories, moves, words } = trace;
  const last = stories.first[story + 1] - 1;
  rows.push([words[moves.state[last]], timeText(moves.at_s[last]), "", ""]);
  return table(["state", "from", "for", "share"], rows, 1);
}

function factsTable(trace, story) {
  const rows = Object.entries(factsOf(trace, story)).map(([fact, count]) => [FACT_NAMES[fact], count.toLocaleString("en")]);
  return table(["", ""], rows, 1);
}

function jobsTable(trace, story) {
  const { jobs } = trace;
  const found = trace.jobsByStory.get(trace.stories.number[story]) || [];
  const rows = found.slice(0, MOST_JOBS).map((job) => [
    `${jobs.job_id[job]} ${trace.directions[jobs.direction[job]]}`,
    trace.words[jobs.outcome[job]],
    timeText(jobs.launched_s[job]),
    durationText(jobs.ended_s[job] - jobs.launched_s[job]),
    countText(jobs.num_blocks[job], "block"),
  ]);
  const title = found.length > MOST_JOBS ? `job (the first ${MOST_JOBS} of ${found.length})` : "job";
  return rows.length ? table([title, "", "launched", "settled after", ""], rows, 2) : element("p", "no jobs of its own", "soft");
}
