// The occupancy of the pools: one plot for each tier, in blocks.

const MEASURES = {
  tables: ["running", "in tables of requests and prefetches"],
  loading: ["loading", "being loaded"],
  filled: ["pool", "filled by copies, at most"],
  filling: ["pinned", "being copied there"],
};

// For the device, blocks in tables and blocks being loaded. For every other tier, blocks that copies fill.
function measureOf(name) {
  if (name === "device_tables") return MEASURES.tables;
  if (name === "device_filling") return MEASURES.loading;
  return name.endsWith("_filled") ? MEASURES.filled : MEASURES.filling;
}

class Plot {
  constructor(canvas, plot, trace, view) {
    Object.assign(this, { canvas, plot, trace, view });
  }

  get title() {
    return `${this.plot.name} blocks`;
  }

  get runtimes() {
    const { trace, view } = this;
    return trace.runtimes.filter((life) => !view.runtime || life.number === view.runtime);
  }

  // The largest pool on the screen, or a higher value.
  highest() {
    let highest = 1;
    for (const life of this.runtimes) {
      if (life.start_s > this.view.stopS || life.stop_s < this.view.startS) continue;
      highest = Math.max(highest, life[this.plot.pool]);
      for (const measure of [this.plot.area, this.plot.line]) {
        const series = this.seriesOf(life, measure);
        if (series) highest = series.value.reduce((most, value) => Math.max(most, value), highest);
      }
    }
    return highest;
  }

  seriesOf(life, measure) {
    return (this.trace.usages[life.number] || {})[measure];
  }

  draw() {
    const box = prepare(this.canvas, this.canvas.clientHeight);
    const highest = this.highest() * 1.08;
    const scale = { ...box, toY: (value) => box.height - (value / highest) * box.height };
    for (const life of this.runtimes) {
      this.drawArea(scale, life);
      this.drawSteps(scale, this.seriesOf(life, this.plot.line), life, measureOf(this.plot.line)[0]);
      this.drawPool(scale, life);
    }
    box.context.font = "11px system-ui, sans-serif";
    box.context.fillStyle = colour("ground");
    box.context.fillRect(0, 0, box.context.measureText(this.title).width + 12, 17);
    box.context.fillStyle = colour("text");
    box.context.fillText(this.title, 6, 13);
  }

  drawPool(scale, life) {
    const { context, width, toY } = scale;
    const [left, right] = [this.view.toX(life.start_s, width), this.view.toX(life.stop_s, width)];
    if (!life[this.plot.pool] || right < 0 || left > width) return;
    context.strokeStyle = context.fillStyle = colour("soft");
    context.lineWidth = 1;
    context.setLineDash([4, 4]);
    context.beginPath();
    context.moveTo(left, toY(life[this.plot.pool]));
    context.lineTo(right, toY(life[this.plot.pool]));
    context.stroke();
    context.setLineDash([]);
    context.font = "10px system-ui, sans-serif";
    context.fillText(life[this.plot.pool].toLocaleString("en"), Math.max(left, 90) + 4, toY(life[this.plot.pool]) + 11);
  }

  // From left to right, each value until the next one.
  tracePath(scale, series, life) {
    const { context, width, toY } = scale;
    context.beginPath();
    context.moveTo(this.view.toX(life.start_s, width), toY(0));
    let value = 0;
    for (let at = 0; at < series.at_s.length; at++) {
      const x = this.view.toX(series.at_s[at], width);
      context.lineTo(x, toY(value));
      value = series.value[at];
      context.lineTo(x, toY(value));
    }
    const end = this.view.toX(life.stop_s, width);
    context.lineTo(end, toY(value));
    context.lineTo(end, toY(0));
  }

  drawArea(scale, life) {
    const series = this.seriesOf(life, this.plot.area);
    if (!series) return;
    this.tracePath(scale, series, life);
    scale.context.globalAlpha = 0.35;
    scale.context.fillStyle = colour(measureOf(this.plot.area)[0]);
    scale.context.fill();
    scale.context.globalAlpha = 1;
    scale.context.strokeStyle = scale.context.fillStyle;
    scale.context.lineWidth = 1;
    scale.context.stroke();
  }

  drawSteps(scale, series, life, name) {
    if (!series) return;
    this.tracePath(scale, series, life);
    scale.context.strokeStyle = colour(name);
    scale.context.lineWidth = 1.5;
    scale.context.stroke();
  }

  tip(event) {
    const box = this.canvas.getBoundingClientRect();
    const atS = this.view.toTime(event.clientX - box.left, box.width);
    const lines = [timeText(atS)];
    for (const life of this.runtimes) {
      if (life.start_s > atS || life.stop_s < atS) continue;
      lines.push(`${life.name}: ${countText(life[this.plot.pool], "block")} in all`);
      for (const measure of [this.plot.area, this.plot.line]) {
        const series = this.seriesOf(life, measure);
        if (series) lines.push(`  ${valueAt(series, atS).toLocaleString("en")} ${measureOf(measure)[1]}`);
      }
    }
    return lines.length > 1 ? lines.join("\n") : "";
  }
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
