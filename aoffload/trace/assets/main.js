// Puts the panels together and handles the reader's input.

const MOST_MATCHES = 20;
const MOST_OPEN = 10;
const MOST_RUNTIMES = 12;
const NOTE_S = 0.5; // what is shown on either side of a note
const WHEEL_STEP = 0.0015;
const $ = (id) => document.getElementById(id);

// A runtime: a frame with its name, and in it a row for each panel, with a label.
class RuntimeSection {
  constructor(page, life) {
    Object.assign(this, { page, life });
    const { trace } = page;
    this.bars = trace.bars.get(life.number);
    this.box = element("section", undefined, "runtime");
    this.box.dataset.runtime = String(life.number);
    this.box.setAttribute("aria-label", life.name);
    const heading = element("h2", `${life.name} `);
    heading.append(element("small", life.about));
    this.box.append(heading);
    this.requests = this.addTimelines("Requests", this.bars.requests, "requests");
    this.steps = this.addTimelines("Steps", this.bars.steps, "steps");
    this.bars.jobs.forEach((jobs, link) => jobs.length && this.addJobs(trace.links[link], jobs));
    for (const tier of trace.tiers) this.addPlot(tier);
  }

  panels = [];

  addRow(title, about, panel, made) {
    const label = element("div", undefined, "label");
    label.append(element("b", title), ...about.filter(Boolean).map((line) => element("small", line)));
    const canvas = panel.tagName === "CANVAS" ? panel : panel.querySelector("canvas");
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `${title} of ${this.life.name} over time`);
    const row = element("div", undefined, "row");
    row.append(label, panel);
    this.box.append(row);
    this.panels.push(made);
    return made;
  }

  addTimelines(title, bars, name) {
    if (!bars.length) return null;
    const { trace, view } = this.page;
    const { lane, startS, stopS } = trace.timelines;
    const isRequests = name === "requests";
    const prefix = isRequests ? sharedPrefix(requestsOf(trace, bars).map((bar) => trace.timelines.name[bar])) : "";
    const painter = new TimelinePainter(trace, view, prefix);
    const panel = scroller(name);
    const gantt = new Gantt(panel, new LaneIndex(bars, lane, startS, stopS), painter, view);
    const about = isRequests ? [outcomeCounts(trace, bars), prefix && `ids begin with ${prefix}`] : [numberText(bars.length)];
    this.addRow(title, about, panel, gantt);
    listenToPointer(this.page, gantt, (event) => {
      const { bar, atS } = gantt.barAt(event);
      return bar < 0 ? "" : timelineTip(trace, bar, atS);
    }, (event) => this.page.select(gantt.barAt(event).bar));
    return gantt;
  }

  addJobs(link, bars) {
    const { trace, view } = this.page;
    const { lane, launched_s: startS, ended_s: stopS, num_bytes: numBytes, timeline } = trace.jobs;
    const panel = scroller("jobs");
    panel.dataset.link = link.name;
    const gantt = new Gantt(panel, new LaneIndex(bars, lane, startS, stopS), new JobPainter(trace, view), view);
    const bytes = bars.reduce((sum, job) => sum + numBytes[job], 0);
    const about = `${numberText(bars.length)} ${bars.length === 1 ? "copy" : "copies"}${bytes ? `, ${sizeText(bytes)}` : ""}`;
    this.addRow(link.name[0].toUpperCase() + link.name.slice(1), [about], panel, gantt);
    const jobAt = (event) => gantt.barAt(event).bar;
    listenToPointer(this.page, gantt, (event) => (jobAt(event) < 0 ? "" : jobTip(trace, jobAt(event))), (event) => {
      const owner = jobAt(event) < 0 ? undefined : trace.timelineByNumber.get(timeline[jobAt(event)]);
      if (owner !== undefined) this.page.select(owner);
    });
  }

  addPlot(tier) {
    const canvas = element("canvas", undefined, "plot");
    canvas.dataset.tier = tier.name;
    const plot = new Plot(canvas, tier, this.life, this.page.trace, this.page.view);
    if (!plot.isKnown) return;
    this.addRow(TIER_NAMES[tier.name], plot.about, canvas, plot);
    listenToPointer(this.page, plot, (event) => plot.tip(event), () => {});
  }

  draw() {
    for (const panel of this.panels) panel.draw();
  }

  refreshColours() {
    for (const { painter } of this.panels) if (painter) painter.refreshColours();
  }

  reveal(timeline) {
    const panel = isStep(this.page.trace, timeline) ? this.steps : this.requests;
    panel.reveal(this.page.trace.timelines.lane[timeline]);
    panel.scroller.parentElement.scrollIntoView({ block: "nearest" });
  }
}

// Without prefetches, fetches, demotions and pins, which are drawn among them.
function requestsOf(trace, bars) {
  const request = trace.kinds.indexOf("request");
  return bars.filter((bar) => trace.timelines.kind[bar] === request);
}

function scroller(name) {
  const made = element("div", undefined, `scroller ${name}`);
  const spacer = element("div", undefined, "spacer");
  spacer.append(element("canvas"));
  made.append(spacer);
  return made;
}

class Page {
  constructor(trace) {
    this.trace = trace;
    this.view = new View(trace.first_s, trace.last_s);
    this.view.changed = () => this.redraw();
    this.made = new Map();
    this.isDue = false;
    this.fillRuntimes(0);
  }

  // The frames of one runtime, or of the first ones of the log.
  fillRuntimes(number) {
    const { runtimes } = this.trace;
    const shown = number ? [runtimes[number - 1]] : runtimes.slice(0, MOST_RUNTIMES);
    for (const life of shown) if (!this.made.has(life.number)) this.made.set(life.number, new RuntimeSection(this, life));
    this.sections = shown.map((life) => this.made.get(life.number));
    $("tip").hidden = true; // what it was about may be gone
    $("runtimes").replaceChildren(...this.sections.map(({ box }) => box));
    $("rest").hidden = number > 0 || shown.length === runtimes.length;
    $("rest").textContent = `The first ${shown.length} of ${numberText(runtimes.length)} runtimes. Choose another one at the top.`;
    $("runtime").value = String(number);
  }

  // However many changes there are, draw once per frame.
  redraw() {
    if (this.isDue) return;
    this.isDue = true;
    requestAnimationFrame(() => {
      this.isDue = false;
      this.draw();
    });
  }

  draw() {
    drawAxis($("axis"), this.view);
    for (const section of this.sections) section.draw();
  }

  select(timeline) {
    this.view.selected = timeline;
    if (timeline < 0) {
      $("timeline").hidden = true;
    } else {
      showTimeline($("timeline"), this.trace, timeline, () => this.select(-1));
    }
    this.redraw();
  }

  goTo(timeline) {
    const { timelines } = this.trace;
    const shown = () => this.sections.find(({ life }) => life.number === timelines.runtime[timeline]);
    if (!shown()) this.fillRuntimes(timelines.runtime[timeline]);
    this.select(timeline);
    this.view.showTimeline(timelines.startS[timeline], timelines.stopS[timeline]);
    shown().reveal(timeline);
  }

  showRuntime(number) {
    this.fillRuntimes(number);
    const life = this.trace.runtimes[number - 1];
    if (life) this.view.showTimeline(life.start_s, life.stop_s);
    else this.view.showAll();
  }

  refreshColours() {
    for (const section of this.made.values()) section.refreshColours();
    this.redraw();
  }
}

function fillHeader(trace) {
  $("title").textContent = trace.title;
  $("derived").textContent = trace.derived;
  for (const life of trace.runtimes) {
    const option = element("option", life.name);
    option.value = String(life.number);
    $("runtime").append(option);
  }
  if (trace.remarks.length) {
    $("remarks").hidden = false;
    $("remarks").firstElementChild.textContent = countText(trace.remarks.length, "remark") + " about this log";
    $("remarks").lastElementChild.append(...trace.remarks.map((remark) => element("li", remark)));
  }
}

// Unfinished timelines come first, because they may be stuck.
function fillOpen(page) {
  const { trace } = page;
  const { timelines } = trace;
  const open = openTimelines(trace);
  $("open").hidden = !open.length;
  $("open").querySelector("small").textContent = `at ${timeText(trace.last_s)}, the longest first` +
    (open.length > MOST_OPEN ? ` (${MOST_OPEN} of ${numberText(open.length)})` : "");
  const shown = open.slice(0, MOST_OPEN);
  const last = shown.map((timeline) => intervalsOf(trace, timeline).pop());
  const whole = durationColumn(shown.map((at) => timelines.stopS[at] - timelines.startS[at]));
  const now = durationColumn(last.map((interval) => (interval ? interval.stopS - interval.startS : 0)));
  const rows = shown.map((timeline, at) => [
    whole.texts[at],
    linkButton(timelineTitle(trace, timeline), () => page.goTo(timeline)),
    isStep(trace, timeline) ? `holds ${countText(factsOf(trace, timeline).num_blocks ?? 0, "block")}` : last[at] ? stateText(trace, last[at].state) : "",
    now.texts[at],
    runtimeName(trace, timelines.runtime[timeline]),
  ]);
  const columns = [[`open for (${whole.unit})`, true], ["request or step", false], ["state", false], [`in that state for (${now.unit})`, true], ["runtime", false]];
  if (rows.length) $("open").append(table(columns, rows));
}

// Alarms, disabled storage, switches of the eviction order: one line each, with a link to its time.
function fillNotes(page) {
  const { notes, num_notes_left_out: rest } = page.trace;
  $("notes").hidden = !notes.length;
  $("notes").querySelector("small").textContent = rest ? `the first ${notes.length} of ${numberText(notes.length + rest)}` : "";
  const rows = notes.map(({ at_s: atS, runtime, text }) => [
    timeText(atS),
    linkButton(text, () => page.view.showTimeline(atS - NOTE_S, atS + NOTE_S)),
    runtimeName(page.trace, runtime),
  ]);
  if (rows.length) $("notes").append(table([["time (UTC)", true], ["event", false], ["runtime", false]], rows));
}

// The numbers of requests by outcome, the most frequent one first.
function outcomeCounts(trace, bars) {
  const counts = new Map();
  for (const bar of requestsOf(trace, bars)) {
    const outcome = trace.words[trace.timelines.outcome[bar]];
    counts.set(outcome, (counts.get(outcome) || 0) + 1);
  }
  const found = [...counts].sort(([, a], [, b]) => b - a);
  return found.map(([outcome, count]) => `${numberText(count)} ${outcome}`).join(", ");
}

// An entry has a colour, a text, and the shape of its mark: empty for a square.
function fillLegend(id, entries) {
  $(id).replaceChildren(
    ...entries.map(([name, text, shape]) => {
      const line = element("li");
      const mark = element("i", undefined, shape);
      if (name) mark.style.background = `var(--${name})`;
      line.append(mark, text);
      return line;
    }),
  );
}

function fillLegends(trace) {
  const used = new Set(Array.from(trace.moves.state, (word) => trace.words[word]));
  const states = Object.keys(trace.states).filter((name) => used.has(name));
  const others = [["moving", "prefetch, fetch or demotion"], ["held", "pin: keeps a prefix in the cache"]].filter(([name]) => used.has(name));
  const ends = [["aborted", "bad", "was aborted"], ["unfinished", "open", "is not over"]].filter(([name]) => used.has(name));
  fillLegend("states", [
    ...states.map((name) => [name, stateText(trace, name)]),
    ...others,
    ...ends.map(([, name, text]) => [name, text, "end"]),
  ]);
  const copies = new Set(Array.from(trace.jobs.outcome, (word) => trace.words[word]));
  const ways = new Set(Array.from(trace.jobs.link, (link) => trace.links[link].direction));
  fillLegend("directions", [
    ...(used.has("step") ? [["step", "step: holds its blocks until it ends"]] : []),
    ...(ways.has("load") ? [["loading", "load: copy to a faster tier"]] : []),
    ...(ways.has("store") ? [["store", "store: copy to a slower tier"]] : []),
    ...(copies.has("failed") ? [["bad", "copy failed"]] : []),
    ...(copies.has("refused") ? [["refused", "copy refused, because its storage failed before"]] : []),
  ]);
  fillLegend("measures", [
    ["used", "device: blocks in block tables; other tiers: blocks that copies filled, at most"],
    ["incoming", "blocks being copied in", "line"],
    ["", "size of the pool", "dashed"],
  ]);
}

function showTip(event, text) {
  const tip = $("tip");
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  tip.style.left = `${Math.max(0, Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8))}px`;
  const below = event.clientY + 18;
  tip.style.top = `${below + tip.offsetHeight > window.innerHeight ? event.clientY - tip.offsetHeight - 8 : below}px`;
}

function listenToPointer(page, panel, tipOf, clicked) {
  const { view } = page;
  const target = panel.canvas;
  let from = null;
  let hasMoved = false;
  target.addEventListener("pointerdown", (event) => {
    from = { x: event.clientX, y: event.clientY };
    hasMoved = false;
    target.setPointerCapture(event.pointerId); // a drag may leave the panel
  });
  window.addEventListener("pointerup", () => (from = null));
  target.addEventListener("pointermove", (event) => {
    if (!from || !event.buttons) return showTip(event, tipOf(event));
    const [dx, dy] = [event.clientX - from.x, event.clientY - from.y];
    if (!hasMoved && Math.abs(dx) + Math.abs(dy) < 4) return undefined;
    view.move((-dx / target.clientWidth) * view.durationS);
    if (panel.scroller) panel.scroller.scrollTop -= dy;
    from = { x: event.clientX, y: event.clientY };
    hasMoved = true;
    return showTip(event, "");
  });
  target.addEventListener("click", (event) => hasMoved || clicked(event));
  target.addEventListener("pointerleave", (event) => showTip(event, ""));
  target.addEventListener("wheel", (event) => wheeled(event, view, target), { passive: false });
}

// The wheel alone scrolls the page, as everywhere. A browser sends a pinch as Ctrl and the wheel.
function wheeled(event, view, target) {
  if (!event.ctrlKey && !event.metaKey && !event.shiftKey) return;
  event.preventDefault();
  const amount = Math.abs(event.deltaX) > Math.abs(event.deltaY) ? event.deltaX : event.deltaY;
  if (event.shiftKey || amount !== event.deltaY) {
    view.move((amount / target.clientWidth) * view.durationS);
    return;
  }
  const box = target.getBoundingClientRect();
  view.zoom(view.toTime(event.clientX - box.left, box.width), Math.exp(amount * WHEEL_STEP));
}

function listenToSearch(page) {
  const [wanted, list] = [$("wanted"), $("matches")];
  const look = () => {
    const found = wanted.value ? searchTimelines(page.trace, wanted.value, MOST_MATCHES) : { count: 0, timelines: [] };
    $("found").textContent = wanted.value ? `${numberText(found.count)} found` : "";
    list.hidden = !found.timelines.length;
    list.replaceChildren(...found.timelines.map((timeline) => matchLine(page, timeline, list)));
    return found.timelines;
  };
  wanted.addEventListener("input", look);
  $("search").addEventListener("submit", (event) => {
    event.preventDefault();
    const timelines = look();
    if (timelines.length) page.goTo(timelines[0]);
    list.hidden = true;
  });
}

function matchLine(page, timeline, list) {
  const line = element("li");
  const { timelines } = page.trace;
  const button = element("button", `${timelineTitle(page.trace, timeline)} `);
  const whole = durationText(timelines.stopS[timeline] - timelines.startS[timeline]);
  button.append(element("span", `${timeText(timelines.startS[timeline])}, ${whole}, ${outcomeText(page.trace, timeline)}`, "soft"));
  button.type = "button";
  button.addEventListener("click", () => {
    list.hidden = true;
    page.goTo(timeline);
  });
  line.append(button);
  return line;
}

function listenToKeys(page) {
  const { view } = page;
  const middle = () => (view.startS + view.stopS) / 2;
  const actions = {
    "+": () => view.zoom(middle(), 0.5),
    "=": () => view.zoom(middle(), 0.5),
    "-": () => view.zoom(middle(), 2),
    0: () => view.showAll(),
    ArrowLeft: () => view.move(-view.durationS / 5),
    ArrowRight: () => view.move(view.durationS / 5),
    Escape: () => page.select(-1),
    "/": () => $("wanted").focus(),
  };
  document.addEventListener("keydown", (event) => {
    const isTyping = ["INPUT", "SELECT"].includes(event.target.tagName);
    if (event.ctrlKey || event.metaKey || event.altKey || (isTyping && event.key !== "Escape")) return;
    const action = actions[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  });
  const buttons = { in: actions["+"], out: actions["-"], whole: actions[0] };
  $("buttons").addEventListener("click", (event) => (buttons[event.target.dataset.do] || (() => {}))());
}

function listenToRest(page) {
  $("runtime").addEventListener("change", (event) => page.showRuntime(Number(event.target.value)));
  window.addEventListener("resize", () => page.redraw());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => page.refreshColours());
}

async function start() {
  const trace = await readTrace(JSON.parse($("data").textContent));
  fillHeader(trace);
  const page = new Page(trace);
  fillLegends(trace);
  fillOpen(page);
  fillNotes(page);
  for (const listen of [listenToSearch, listenToKeys, listenToRest]) listen(page);
  page.draw();
  document.body.dataset.readyMs = String(Math.round(performance.now()));
}

start().catch((error) => {
  $("problem").hidden = false;
  $("problem").textContent = `This page could not be drawn: ${error}. It needs a browser of 2023 or later.`;
});
