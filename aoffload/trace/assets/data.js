// The page's data: columns, each deflated, in base64.

const ARRAYS = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, f8: Float64Array };
const NOT_KNOWN = 0xffffffff;
const FACTS = ["num_tokens", "num_device_tokens", "num_host_tokens", "num_disk_tokens", "num_blocks", "num_ready_tokens", "num_lost_tokens",
  "num_computed_tokens", "num_pending", "num_kept_blocks", "num_declined_tokens", "num_skipped_fetches"];

async function readColumn(column) {
  const bytes = Uint8Array.from(atob(column.data), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const response = new Response(stream);
  return column.type === "text" ? JSON.parse(await response.text()) : new ARRAYS[column.type](await response.arrayBuffer());
}

async function readColumns(columns) {
  const names = Object.keys(columns);
  const read = await Promise.all(names.map((name) => readColumn(columns[name])));
  return Object.fromEntries(names.map((name, at) => [name, read[at]]));
}

async function readUsages(usages) {
  const read = {};
  for (const [number, measures] of Object.entries(usages)) {
    read[number] = {};
    for (const [measure, columns] of Object.entries(measures)) read[number][measure] = await readColumns(columns);
  }
  return read;
}

async function readTrace(raw) {
  const [timelines, moves, jobs] = await Promise.all([raw.timelines, raw.moves, raw.jobs].map(readColumns));
  const trace = { ...raw, timelines, moves, jobs, usages: await readUsages(raw.usages) };
  addMoveRanges(trace);
  trace.timelineByNumber = new Map(Array.from(timelines.number, (number, at) => [number, at]));
  trace.jobsByTimeline = groupJobs(jobs);
  trace.bars = groupBars(trace);
  return trace;
}

// What each runtime has: requests and the like, steps, and jobs by link.
function groupBars({ runtimes, kinds, links, timelines, jobs }) {
  const grouped = new Map(runtimes.map(({ number }) => [number, { requests: [], steps: [], jobs: links.map(() => []) }]));
  const step = kinds.indexOf("step");
  timelines.kind.forEach((kind, at) => grouped.get(timelines.runtime[at])[kind === step ? "steps" : "requests"].push(at));
  jobs.link.forEach((link, at) => grouped.get(jobs.runtime[at]).jobs[link].push(at));
  return grouped;
}

// For each timeline: the place of its moves, its begin and end, and its longest state.
function addMoveRanges(trace) {
  const { timelines, moves } = trace;
  const count = timelines.number.length;
  timelines.first = new Uint32Array(count + 1);
  timelines.startS = new Float64Array(count);
  timelines.stopS = new Float64Array(count);
  timelines.main = new Uint16Array(count);
  for (let at = 0, move = 0; at < count; at++) {
    const end = move + timelines.moves[at];
    timelines.first[at] = move;
    timelines.first[at + 1] = end;
    timelines.startS[at] = moves.at_s[move];
    timelines.stopS[at] = moves.at_s[end - 1];
    timelines.main[at] = mainState(moves, move, end);
    move = end;
  }
}

function mainState(moves, first, end) {
  let longest = -1;
  let state = moves.state[first];
  for (let move = first; move < end - 1; move++) {
    const seconds = moves.at_s[move + 1] - moves.at_s[move];
    if (seconds > longest) [longest, state] = [seconds, moves.state[move]];
  }
  return state;
}

function groupJobs(jobs) {
  const grouped = new Map();
  jobs.timeline.forEach((number, at) => {
    if (!number) return;
    if (!grouped.has(number)) grouped.set(number, []);
    grouped.get(number).push(at);
  });
  return grouped;
}

// The states of a timeline, each with its length.
function intervalsOf(trace, timeline) {
  const { timelines, moves, words } = trace;
  const intervals = [];
  for (let move = timelines.first[timeline]; move < timelines.first[timeline + 1] - 1; move++) {
    const [startS, stopS] = [moves.at_s[move], moves.at_s[move + 1]];
    intervals.push({ state: words[moves.state[move]], startS, stopS });
  }
  return intervals;
}

function factsOf(trace, timeline) {
  const known = FACTS.filter((fact) => trace.timelines[fact][timeline] !== NOT_KNOWN);
  return Object.fromEntries(known.map((fact) => [fact, trace.timelines[fact][timeline]]));
}

function isStep(trace, timeline) {
  return trace.kinds[trace.timelines.kind[timeline]] === "step";
}

// Requests and steps that have not ended, longest open first.
function openTimelines(trace) {
  const { outcome, kind, startS, stopS } = trace.timelines;
  const unfinished = trace.words.indexOf("unfinished");
  const kinds = ["request", "step"].map((name) => trace.kinds.indexOf(name));
  const found = Array.from(outcome.keys()).filter((at) => outcome[at] === unfinished && kinds.includes(kind[at]));
  return found.sort((a, b) => stopS[b] - startS[b] - (stopS[a] - startS[a]) || a - b);
}

// At most `most` timelines whose name contains the text: the same name first, then in the order of the log.
function searchTimelines(trace, text, most) {
  const names = trace.timelines.name;
  const same = [];
  const others = [];
  let count = 0;
  for (let at = 0; at < names.length; at++) {
    if (!names[at].includes(text) || isStep(trace, at)) continue;
    count += 1;
    if (names[at] === text) same.push(at);
    else if (others.length < most) others.push(at);
  }
  return { count, timelines: [...same, ...others].slice(0, most) };
}
