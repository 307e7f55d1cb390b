// Bars in lanes. Bars narrower than a pixel that share it are drawn once.

const TALLEST = 20;
const LOWEST = 4;
const LOWEST_NAMED = 14;
const NAME_FONT = "11px system-ui, sans-serif";
const NARROWEST_NAME = 16;
const FEWEST_LETTERS = 6;

// The bars of each lane, in the order of time. Bars of one lane never overlap.
class LaneIndex {
  constructor(bars, lanes, startS, stopS) {
    const numLanes = bars.reduce((most, bar) => Math.max(most, lanes[bar] + 1), 1);
    this.offsets = new Uint32Array(numLanes + 1);
    for (const bar of bars) this.offsets[lanes[bar] + 1] += 1;
    for (let lane = 0; lane < numLanes; lane++) this.offsets[lane + 1] += this.offsets[lane];
    const next = this.offsets.slice();
    this.bars = new Uint32Array(bars.length);
    for (const bar of bars.sort((a, b) => startS[a] - startS[b] || a - b)) this.bars[next[lanes[bar]]++] = bar;
    Object.assign(this, { numLanes, startS, stopS });
  }

  // The index of the first bar of the lane that ends at that time or later.
  seek(lane, atS) {
    let [low, high] = [this.offsets[lane], this.offsets[lane + 1]];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.stopS[this.bars[middle]] < atS) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  // The bar nearest to that time, within that many seconds; -1 if there is none.
  nearest(lane, atS, tolerance) {
    let [best, distance] = [-1, tolerance];
    for (let at = this.seek(lane, atS - tolerance); at < this.offsets[lane + 1]; at++) {
      const bar = this.bars[at];
      if (this.startS[bar] > atS + tolerance) break;
      const off = Math.max(this.startS[bar] - atS, atS - this.stopS[bar], 0);
      if (off <= distance) [best, distance] = [bar, off];
      if (off === 0 && best === bar) break;
    }
    return best;
  }
}

// A scroller with all lanes, and a canvas as large as its visible part.
class Gantt {
  constructor(scroller, index, painter, view) {
    Object.assign(this, { scroller, index, painter, view });
    this.spacer = scroller.firstElementChild;
    this.canvas = scroller.querySelector("canvas");
    scroller.addEventListener("scroll", () => this.draw());
  }

  get laneHeight() {
    const most = parseFloat(getComputedStyle(this.scroller).maxHeight);
    return Math.max(LOWEST, Math.min(TALLEST, Math.floor(most / this.index.numLanes)));
  }

  draw() {
    const laneHeight = this.laneHeight;
    const whole = Math.max(this.index.numLanes * laneHeight, 1);
    this.spacer.style.height = `${whole}px`;
    const height = Math.min(this.scroller.clientHeight, whole) || 1;
    this.canvas.style.height = `${height}px`;
    const { context, width } = prepare(this.canvas, height);
    drawGrid({ context, width, height }, this.view);
    const top = this.scroller.scrollTop;
    const last = Math.min(this.index.numLanes - 1, Math.floor((top + height) / laneHeight));
    for (let lane = Math.floor(top / laneHeight); lane <= last; lane++) {
      this.drawLane(context, width, lane, lane * laneHeight - top, laneHeight);
    }
  }

  drawLane(context, width, lane, y, laneHeight) {
    const { index, view, painter } = this;
    const height = laneHeight > 6 ? laneHeight - 2 : laneHeight - 1;
    const box = { context, width, y, height, view };
    let covered = -1;
    for (let at = index.seek(lane, view.startS); at < index.offsets[lane + 1]; at++) {
      const bar = index.bars[at];
      if (index.startS[bar] > view.stopS) break;
      const right = view.toX(index.stopS[bar], width);
      if (right <= covered && bar !== painter.marked) continue;
      const left = view.toX(index.startS[bar], width);
      painter.paint(box, bar, left, right);
      covered = Math.max(covered, Math.floor(Math.max(left + 1, right)));
    }
  }

  barAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const lane = Math.floor((event.clientY - box.top + this.scroller.scrollTop) / this.laneHeight);
    if (lane < 0 || lane >= this.index.numLanes) return { bar: -1, atS: 0 };
    const atS = this.view.toTime(event.clientX - box.left, box.width);
    const tolerance = (this.view.durationS / box.width) * 3;
    return { bar: this.index.nearest(lane, atS, tolerance), atS };
  }

  reveal(lane) {
    const top = lane * this.laneHeight;
    const shown = this.scroller.clientHeight;
    if (top < this.scroller.scrollTop || top + this.laneHeight > this.scroller.scrollTop + shown) {
      this.scroller.scrollTop = Math.max(0, top - shown / 2);
    }
  }
}

// Requests, prefetches, fetches, demotions, pins and steps, by state, with their names where those fit, without the prefix that
// all share. An abort ends in red, an unfinished timeline with an open end.
class TimelinePainter {
  constructor(trace, view, prefix = "") {
    Object.assign(this, { trace, view, prefix });
    this.aborted = trace.words.indexOf("aborted");
    this.unfinished = trace.words.indexOf("unfinished");
    this.refreshColours();
  }

  refreshColours() {
    this.colours = this.trace.words.map((word) => (/^[a-z]+$/.test(word) && colour(word)) || colour("soft"));
    this.bad = colour("bad");
    this.open = colour("open");
    this.mark = colour("mark");
    this.label = colour("label");
  }

  get marked() {
    return this.view.selected;
  }

  paint(box, timeline, left, right) {
    const { timelines } = this.trace;
    if (right - left < 1.5) {
      this.fill(box, timelines.outcome[timeline] === this.aborted ? this.bad : this.colours[timelines.main[timeline]], left, 1);
    } else {
      this.paintStates(box, timeline);
      this.paintName(box, timeline, Math.max(left, 0), Math.min(right, box.width));
    }
    if (timeline === this.view.selected) this.outline(box, left, right);
  }

  paintStates(box, timeline) {
    const { timelines, moves } = this.trace;
    const end = timelines.first[timeline + 1] - 1;
    for (let move = timelines.first[timeline]; move < end; move++) {
      const left = box.view.toX(moves.at_s[move], box.width);
      const right = box.view.toX(moves.at_s[move + 1], box.width);
      if (right >= 0 && left <= box.width) this.fill(box, this.colours[moves.state[move]], left, right - left);
    }
    const stop = box.view.toX(moves.at_s[end], box.width);
    if (timelines.outcome[timeline] === this.aborted) this.fill(box, this.bad, stop - 3, 3);
    if (timelines.outcome[timeline] === this.unfinished) this.fill(box, this.open, stop, 6);
  }

  paintName(box, timeline, left, right) {
    if (box.height < LOWEST_NAMED || right - left < NARROWEST_NAME) return;
    const { context } = box;
    const name = isStep(this.trace, timeline) ? this.trace.timelines.name[timeline] : timelineTitle(this.trace, timeline);
    context.font = NAME_FONT;
    const text = fitText(context, name.startsWith(this.prefix) ? name.slice(this.prefix.length) : name, right - left - 8);
    context.fillStyle = this.label;
    context.fillText(text, left + 4, box.y + box.height / 2 + 4);
  }

  fill(box, style, left, width) {
    const from = Math.max(left, -1);
    box.context.fillStyle = style;
    box.context.fillRect(from, box.y, Math.max(0.6, Math.min(left + width, box.width + 1) - from), box.height);
  }

  outline(box, left, right) {
    box.context.strokeStyle = this.mark;
    box.context.lineWidth = 2;
    box.context.strokeRect(left - 2, box.y - 1, Math.max(4, right - left + 4), box.height + 2);
  }
}

// Jobs of one link.
class JobPainter extends TimelinePainter {
  refreshColours() {
    this.colours = this.trace.links.map(({ direction }) => colour(direction === "load" ? "loading" : "store"));
    this.ends = new Map([["failed", "bad"], ["refused", "refused"]].map(([word, name]) => [this.trace.words.indexOf(word), colour(name)]));
    this.mark = colour("mark");
  }

  get marked() {
    return -1;
  }

  paint(box, job, left, right) {
    const { jobs, timelines } = this.trace;
    const style = this.ends.get(jobs.outcome[job]) || this.colours[jobs.link[job]];
    this.fill(box, style, left, Math.max(1, right - left));
    const selected = this.view.selected;
    if (selected >= 0 && jobs.timeline[job] && jobs.timeline[job] === timelines.number[selected]) this.outline(box, left, right);
  }
}

// The text, or its first word, which is the number of a step, or as much of its beginning as fits. Nothing if that is little.
function fitText(context, text, width) {
  for (const whole of [text, text.split(" ")[0]]) if (context.measureText(whole).width <= width) return whole;
  const length = Math.floor((text.length * width) / context.measureText(text).width) - 2;
  return length >= FEWEST_LETTERS ? `${text.slice(0, length)}\u2026` : "";
}
