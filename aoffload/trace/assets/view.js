// The time range on the screen, which all panels share.

const MARGIN_SHARE = 0.02;
const SHORTEST_S = 1e-5;

class View {
  constructor(firstS, lastS) {
    const margin = Math.max((lastS - firstS) * MARGIN_SHARE, SHORTEST_S);
    this.whole = { startS: firstS - margin, stopS: lastS + margin };
    this.runtime = 0;
    this.selected = -1;
    this.changed = () => {};
    Object.assign(this, this.whole);
  }

  get durationS() {
    return this.stopS - this.startS;
  }

  toX(atS, width) {
    return ((atS - this.startS) / this.durationS) * width;
  }

  toTime(x, width) {
    return this.startS + (x / width) * this.durationS;
  }

  show(startS, stopS) {
    const longest = this.whole.stopS - this.whole.startS;
    const duration = Math.min(Math.max(stopS - startS, SHORTEST_S), longest);
    const middle = (startS + stopS) / 2;
    this.startS = Math.min(Math.max(middle - duration / 2, this.whole.startS), this.whole.stopS - duration);
    this.stopS = this.startS + duration;
    this.changed();
  }

  zoom(atS, factor) {
    this.show(atS - (atS - this.startS) * factor, atS + (this.stopS - atS) * factor);
  }

  move(seconds) {
    this.show(this.startS + seconds, this.stopS + seconds);
  }

  showAll() {
    this.show(this.whole.startS, this.whole.stopS);
  }

  // Show the whole timeline, with a margin.
  showTimeline(startS, stopS) {
    const margin = Math.max((stopS - startS) * 0.5, SHORTEST_S);
    this.show(startS - margin, stopS + margin);
  }
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// A canvas as many pixels wide as the screen shows of it, with a context in CSS pixels.
function prepare(canvas, height) {
  const scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const [pixelWidth, pixelHeight] = [Math.max(1, Math.round(width * scale)), Math.max(1, Math.round(height * scale))];
  if (canvas.width !== pixelWidth || canvas.height !== pixelHeight) {
    canvas.width = pixelWidth;
    canvas.height = pixelHeight;
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

const AXIS_FONT = "11px system-ui, sans-serif";

// Round times on the screen, each with its place; far enough apart for their texts.
function axisMarks(view, width) {
  const step = roundStep((view.durationS * 108) / width);
  const marks = [];
  for (let mark = Math.ceil(view.startS / step); mark * step < view.stopS; mark++) {
    marks.push({ x: view.toX(mark * step, width), text: axisText(mark * step, step) });
  }
  return marks;
}

function drawAxis(canvas, view) {
  const { context, width } = prepare(canvas, 22);
  context.fillStyle = colour("soft");
  context.font = AXIS_FONT;
  for (const { x, text } of axisMarks(view, width)) {
    context.fillRect(x, 4, 1, 18);
    if (x + context.measureText(text).width + 3 < width) context.fillText(text, x + 3, 14);
  }
}

function drawGrid({ context, width, height }, view) {
  context.fillStyle = colour("faint");
  for (const { x } of axisMarks(view, width)) context.fillRect(x, 0, 1, height);
}

// The time of day with as many decimals as the step needs. toISOString has milliseconds; microseconds are added.
function axisText(atS, step) {
  const micros = Math.round(atS * 1e6);
  const text = `${new Date(Math.floor(micros / 1000)).toISOString().slice(11, 23)}${String(micros % 1000).padStart(3, "0")}`;
  const digits = Math.min(6, Math.max(0, Math.ceil(-Math.log10(step) - 1e-9)));
  return text.slice(0, digits ? 9 + digits : 8);
}
