// How full the memory of a runtime is: one plot for each tier, in blocks, each with a scale of its own.

const TIER_NAMES = { device: "Device memory", host: "Host memory", disk: "Disk", custom: "Custom tier", remote: "Remote store" };
const MOST_EMPTY = 2; // a pool that is higher than this many times what is used of it is not drawn to scale

// The top of a plot's scale: the pool, or a round number above the peak if that would be a flat line under the pool.
function topOfScale(peak, pool) {
  if (!peak) return Math.max(pool, 1);
  return pool > MOST_EMPTY * peak ? roundUp(peak) : Math.max(pool, peak);
}

class Plot {
  constructor(canvas, tier, life, trace, view) {
    Object.assign(this, { canvas, tier, life, view });
    this.pool = life[tier.pool];
    const usages = trace.usages[life.number] || {};
    this.area = usages[tier.area];
    this.line = usages[tier.line];
    this.peak = Math.max(peakOf(this.area), peakOf(this.line));
    this.top = topOfScale(this.peak, this.pool);
  }

  // A tier of which nothing is known has no plot.
  get isKnown() {
    return this.pool > 0 || this.peak > 0;
  }

  get about() {
    const most = peakOf(this.area);
    return [
      this.pool ? `pool: ${countText(this.pool, "block")}` : "in blocks",
      `most used: ${numberText(most)}`,
      this.pool && most > this.pool ? "(shared blocks count several times)" : "",
    ];
  }

  draw() {
    const box = prepare(this.canvas, this.canvas.clientHeight);
    drawGrid(box, this.view);
    const [above, below] = [16, 3];
    const scale = { ...box, toY: (value) => box.height - below - (value / this.top) * (box.height - above - below) };
    this.drawArea(scale);
    this.drawLine(scale);
    this.drawPool(scale);
    this.drawScale(scale);
  }

  drawPool({ context, width, toY }) {
    const [left, right] = [this.view.toX(this.life.start_s, width), this.view.toX(this.life.stop_s, width)];
    if (!this.pool || this.pool > this.top || right < 0 || left > width) return;
    context.strokeStyle = colour("soft");
    context.lineWidth = 1.5;
    context.setLineDash([5, 4]);
    context.beginPath();
    context.moveTo(left, toY(this.pool));
    context.lineTo(right, toY(this.pool));
    context.stroke();
    context.setLineDash([]);
  }

  // The top and the middle of the scale, over what is drawn; and where the pool is, if it is not on the scale.
  drawScale({ context, toY }) {
    context.font = AXIS_FONT;
    context.lineWidth = 3;
    context.strokeStyle = colour("ground");
    context.fillStyle = colour("soft");
    const write = (text, value) => {
      context.strokeText(text, 2, toY(value) - 3);
      context.fillText(text, 2, toY(value) - 3);
      context.fillRect(0, toY(value), 8, 1);
    };
    const isAbove = this.pool > this.top;
    write(`${numberText(this.top)}${isAbove ? ` (the pool is higher: ${numberText(this.pool)})` : ""}`, this.top);
    if (this.top % 2 === 0) write(numberText(this.top / 2), this.top / 2);
    write("0", 0);
  }

  // From left to right, each value until the next one.
  tracePath({ context, width, toY }, series) {
    context.beginPath();
    context.moveTo(this.view.toX(this.life.start_s, width), toY(0));
    let value = 0;
    for (let at = 0; at < series.at_s.length; at++) {
      const x = this.view.toX(series.at_s[at], width);
      context.lineTo(x, toY(value));
      value = series.value[at];
      context.lineTo(x, toY(value));
    }
    const end = this.view.toX(this.life.stop_s, width);
    context.lineTo(end, toY(value));
    context.lineTo(end, toY(0));
  }

  drawArea(scale) {
    if (!this.area) return;
    this.tracePath(scale, this.area);
    scale.context.globalAlpha = 0.4;
    scale.context.fillStyle = scale.context.strokeStyle = colour("used");
    scale.context.fill();
    scale.context.globalAlpha = 1;
    scale.context.lineWidth = 1;
    scale.context.stroke();
  }

  drawLine(scale) {
    if (!this.line || !peakOf(this.line)) return;
    this.tracePath(scale, this.line);
    scale.context.strokeStyle = colour("incoming");
    scale.context.lineWidth = 1.5;
    scale.context.stroke();
  }

  tip(event) {
    const box = this.canvas.getBoundingClientRect();
    const atS = this.view.toTime(event.clientX - box.left, box.width);
    if (this.life.start_s > atS || this.life.stop_s < atS) return "";
    const lines = [`${TIER_NAMES[this.tier.name]} at ${timeText(atS)}`];
    if (this.area) lines.push(`${numberText(valueAt(this.area, atS))} used${this.pool ? ` of ${countText(this.pool, "block")}` : ""}`);
    if (this.line) lines.push(`${numberText(valueAt(this.line, atS))} being copied in`);
    return [...lines, this.life.name].join("\n");
  }
}

function peakOf(series) {
  return series ? series.value.reduce((most, value) => Math.max(most, value), 0) : 0;
}

function valueAt(series, atS) {
  let [low, high] = [0, series.at_s.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (series.at_s[middle] <= atS) low = middle + 1;
    else high = middle;
  }
  return low ? series.value[low - 1] : 0;
}
