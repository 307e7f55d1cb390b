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

function drawAxis(canvas, view) {
  const { context, width } = prepare(canvas, 20);
  const step = roundStep((view.durationS * 90) / width);
  const digits = step >= 1 ? 0 : step >= 1e-3 ? 3 : 6;
  context.fillStyle = colour("soft");
  context.font = "11px system-ui, sans-serif";
  for (let mark = Math.ceil(view.startS / step); mark * step < view.stopS; mark++) {
    const atS = mark * step;
    const x = view.toX(atS, width);
    context.fillRect(x, 14, 1, 6);
    if (x < width - 60) context.fillText(axisText(atS, digits), x + 3, 12);
  }
}

// toISOString has milliseconds; the digits after them are added.
function axisText(atS, digits) {
  const micros = Math.round(atS * 1e6);
  const text = new Date(Math.floor(micros / 1000)).toISOString();
  if (digits === 0) return text.slice(11, 19);
  return digits === 3 ? text.slice(14, 23) : `${text.slice(17, 23)}${String(micros % 1000).padStart(3, "0")}`;
}
