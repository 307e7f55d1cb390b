// Puts the panels together and handles the reader's input.

const MOST_MATCHES = 20;
const MOST_OPEN = 10;
const NOTE_S = 0.5; // what is shown on either side of a note
const WHEEL_STEP = 0.0015;
const $ = (id) => document.getElementById(id);

class Page {
  constructor(trace) {
    this.trace = trace;
    this.view = new View(trace.first_s, trace.last_s);
    this.view.changed = () => this.redraw();
    this.gantt = new Gantt($("gantt"), timelineIndex(trace), new TimelinePainter(trace, this.view), this.view);
    this.steps = new Gantt($("steps"), stepIndex(trace), new TimelinePainter(trace, this.view), this.view);
    this.jobs = trace.usedLinks.map((link) => {
      return new Gantt(jobLanes(trace.links[link].name), jobIndex(trace, link), new JobPainter(trace, this.view), this.view);
    });
    this.plots = shownTiers(trace).map((tier) => new Plot(plotCanvas(tier.name), tier, trace, this.view));
    this.isDue = false;
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
    for (const panel of [this.gantt, this.steps, ...this.jobs, ...this.plots]) panel.draw();
  }

  select(timeline) {
    this.view.selected = timeline;
    if (timeline < 0) {
      $("timeline").hidden = true;
    } else {
      showTimeline($("timeline"), this.trace, timeline);
    }
    this.redraw();
  }

  goTo(timeline) {
    const { timelines } = this.trace;
    const { runtime } = this.view;
    if (runtime && runtime !== timelines.runtime[timeline]) this.showRuntime(0);
    this.select(timeline);
    this.view.showTimeline(timelines.startS[timeline], timelines.stopS[timeline]);
    (isStep(this.trace, timeline) ? this.steps : this.gantt).reveal(timelines.lane[timeline]);
  }

  showRuntime(number) {
    this.view.runtime = number;
    $("runtime").value = String(number);
    const life = this.trace.runtimes[number - 1];
    if (life) this.view.showTimeline(life.start_s, life.stop_s);
    else this.view.showAll();
  }
}

function timelineIndex(trace) {
  const { lane, startS, stopS } = trace.timelines;
  const bars = Uint32Array.from(lane.keys()).filter((timeline) => !isStep(trace, timeline));
  return new LaneIndex(Math.max(1, trace.num_lanes), bars, lane, startS, stopS);
}

function stepIndex(trace) {
  const { lane, startS, stopS } = trace.timelines;
  const bars = Uint32Array.from(lane.keys()).filter((timeline) => isStep(trace, timeline));
  return new LaneIndex(Math.max(1, trace.num_step_lanes), bars, lane, startS, stopS);
}

function jobIndex(trace, number) {
  const { lane, link, launched_s: startS, ended_s: stopS } = trace.jobs;
  const bars = Uint32Array.from(lane.keys()).filter((job) => link[job] === number);
  return new LaneIndex(Math.max(1, trace.num_job_lanes[trace.links[number].name]), bars, lane, startS, stopS);
}

// A panel for the jobs of one link, under its name.
function jobLanes(name) {
  const canvas = element("canvas");
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `${name}, over time`);
  const scroller = element("div", undefined, "scroller jobs");
  scroller.append(element("div", undefined, "spacer"));
  scroller.firstElementChild.append(canvas);
  scroller.dataset.link = name;
  $("jobs").append(element("small", name), scroller);
  return scroller;
}

function plotCanvas(name) {
  const canvas = element("canvas", undefined, "plot");
  canvas.id = name;
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `${name} blocks over time`);
  $("plots").append(canvas);
  return canvas;
}

function fillHeader(trace) {
  $("title").textContent = trace.title;
  $("derived").textContent = trace.derived;
  for (const life of trace.runtimes) {
    const option = element("option", life.about);
    option.value = String(life.number);
    $("runtime").append(option);
  }
  if (trace.remarks.length) {
    $("remarks").hidden = false;
    $("remarks").firstElementChild.textContent = countText(trace.remarks.length, "remark") + " about this log";
    $("remarks").lastElementChild.append(...trace.remarks.map((remark) => element("li", remark)));
  }
  $("counts").textContent = outcomeCounts(trace);
}

// Unfinished timelines come first, because they may be stuck.
function fillOpen(page) {
  const { trace } = page;
  const { startS, stopS } = trace.timelines;
  const open = openTimelines(trace);
  $("open").hidden = !open.length;
  $("steps").parentElement.hidden = !trace.num_step_lanes;
  $("open").querySelector("small").textContent = `at ${timeText(trace.last_s)}, the longest first` +
    (open.length > MOST_OPEN ? ` (${MOST_OPEN} of ${open.length.toLocaleString("en")})` : "");
  const lines = open.slice(0, MOST_OPEN).map((timeline) => {
    const line = element("li");
    const button = element("button", `${durationText(stopS[timeline] - startS[timeline])}  ${openText(trace, timeline)}`);
    button.type = "button";
    button.addEventListener("click", () => page.goTo(timeline));
    line.append(button);
    return line;
  });
  $("open").querySelector("ol").replaceChildren(...lines);
}

// Alarms, disabled storage, switches of the eviction order: one line each, with a link to its time.
function fillNotes(page) {
  const { notes, num_notes_left_out: rest, runtimes } = page.trace;
  $("notes").hidden = !notes.length;
  $("notes").querySelector("small").textContent = rest ? `the first ${notes.length} of ${(notes.length + rest).toLocaleString("en")}` : "";
  const lines = notes.map(({ at_s: atS, runtime, text }) => {
    const whose = runtimes.length > 1 ? `${runtimes[runtime - 1].name}: ` : "";
    const line = element("li");
    const button = element("button", `${timeText(atS)}  ${whose}${text}`);
    button.type = "button";
    button.addEventListener("click", () => page.view.showTimeline(atS - NOTE_S, atS + NOTE_S));
    line.append(button);
    return line;
  });
  $("notes").querySelector("ol").replaceChildren(...lines);
}

// Counts of requests. Prefetches, demotions and pins are drawn among them, but not counted.
function outcomeCounts(trace) {
  const { kind, outcome } = trace.timelines;
  const requests = trace.kinds.indexOf("request");
  const counts = new Map();
  outcome.forEach((word, at) => {
    if (kind[at] === requests) counts.set(trace.words[word], (counts.get(trace.words[word]) || 0) + 1);
  });
  return [...counts].map(([name, count]) => `${count.toLocaleString("en")} ${name}`).join(", ");
}

function fillLegend(id, entries) {
  $(id).replaceChildren(
    ...entries.map(([name, text]) => {
      const line = element("li");
      const square = element("i");
      square.style.background = colour(name);
      line.append(square, text);
      return line;
    }),
  );
}

function fillLegends(trace) {
  const used = new Set(Array.from(trace.moves.state, (word) => trace.words[word]));
  const isPending = trace.timelines.num_pending.some((count) => count !== NOT_KNOWN);
  const waits = [...new Set(trace.runtimes.map((life) => (life.is_engine_owned ? "its program" : "room")))];
  const states = { ...(isPending ? { matched: "matched (told to ask again)" } : {}), pinned: `pinned (waits for ${waits.join(", or ")})`, fetching: "fetching (waits for what comes from below host memory)", allocated: "allocated", loading: "loading", draining: "draining (waits for its step)",
    requeued: "requeued (waits for room again)", stranded: "stranded (never has room again)", running: "running",
    preempted: "preempted", moving: "prefetch, fetch or demotion", held: "pin" };
  const shown = Object.entries(states).filter(([name]) => used.has(name));
  const ends = [["aborted", "bad", "aborted"], ["unfinished", "open", "not over"]].filter(([name]) => used.has(name));
  fillLegend("states", [...shown, ...ends.map(([, name, text]) => [name, text])]);
  const refused = trace.words.includes("refused") ? [["soft", "refused (its storage is left alone)"]] : [];
  fillLegend("directions", [["loading", "load"], ["pool", "store"], ["bad", "failed"], ...refused]);
  fillLegend("measures", Object.values(MEASURES));
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

function listenToPointer(page, panel, target, tipOf, clicked) {
  const { view } = page;
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

function wheeled(event, view, target) {
  event.preventDefault();
  const amount = Math.abs(event.deltaX) > Math.abs(event.deltaY) ? event.deltaX : event.deltaY;
  if (event.shiftKey || amount !== event.deltaY) {
    view.move((amount / target.clientWidth) * view.durationS);
    return;
  }
  const box = target.getBoundingClientRect();
  view.zoom(view.toTime(event.clientX - box.left, box.width), Math.exp(amount * WHEEL_STEP));
}

function listenToPanels(page) {
  const { trace, gantt } = page;
  for (const panel of [gantt, page.steps]) {
    const ofTimeline = (event) => {
      const { bar, atS } = panel.barAt(event);
      return bar < 0 ? "" : timelineTip(trace, bar, atS);
    };
    listenToPointer(page, panel, panel.canvas, ofTimeline, (event) => page.select(panel.barAt(event).bar));
  }
  for (const jobs of page.jobs) listenToJobs(page, jobs);
  for (const plot of page.plots) listenToPointer(page, plot, plot.canvas, (event) => plot.tip(event), () => {});
}

function listenToJobs(page, jobs) {
  const { trace } = page;
  const tip = (event) => {
    const { bar } = jobs.barAt(event);
    return bar < 0 ? "" : jobTip(trace, bar);
  };
  const toOwner = (event) => {
    const { bar } = jobs.barAt(event);
    const timeline = bar < 0 ? undefined : trace.timelineByNumber.get(trace.jobs.timeline[bar]);
    if (timeline !== undefined) page.select(timeline);
  };
  listenToPointer(page, jobs, jobs.canvas, tip, toOwner);
}

function listenToSearch(page) {
  const [wanted, list] = [$("wanted"), $("matches")];
  const look = () => {
    const found = wanted.value ? searchTimelines(page.trace, wanted.value, MOST_MATCHES) : { count: 0, timelines: [] };
    $("found").textContent = wanted.value ? `${found.count.toLocaleString("en")} found` : "";
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
  $("why").addEventListener("click", () => {
    $("derived").hidden = !$("derived").hidden;
    $("why").setAttribute("aria-expanded", String(!$("derived").hidden));
  });
  window.addEventListener("resize", () => page.redraw());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const { painter } of [page.gantt, page.steps, ...page.jobs]) painter.refreshColours();
    fillLegends(page.trace);
    page.redraw();
  });
}

async function start() {
  const trace = await readTrace(JSON.parse($("data").textContent));
  const page = new Page(trace);
  fillHeader(trace);
  fillLegends(trace);
  fillOpen(page);
  fillNotes(page);
  for (const listen of [listenToPanels, listenToSearch, listenToKeys, listenToRest]) listen(page);
  page.draw();
  document.body.dataset.readyMs = String(Math.round(performance.now()));
}

start().catch((error) => {
  $("problem").hidden = false;
  $("problem").textContent = `This page could not be drawn: ${error}. It needs a browser of 2023 or later.`;
});
