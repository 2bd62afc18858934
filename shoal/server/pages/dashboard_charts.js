"use strict";
// Charts of the last minutes as SVG, and numbers as people read them. No text of a server is read as HTML.

const SPAN_S = 600, LEAST_SPAN_S = 60, WIDTH = 300, HEIGHT = 64;

/** An SVG element with attributes. */
function draw(tag, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

// Numbers

/** A number in three digits, with a thousand as k. */
function short(value) {
  if (value >= 1e6) return `${(value / 1e6).toPrecision(3)}M`;
  if (value >= 1e4) return `${(value / 1e3).toPrecision(3)}k`;
  return value >= 100 ? Math.round(value).toLocaleString("en") : String(+value.toFixed(1));
}

function seconds(value) {
  if (value < 0.0009995) return `${Math.round(value * 1e6)} µs`;
  if (value < 0.9995) return `${+(value * 1000).toPrecision(3)} ms`;
  if (value < 99.95) return `${+value.toPrecision(3)} s`;
  return value < 7200 ? `${Math.round(value / 60)} min` : `${Math.round(value / 3600)} h`;
}

function percent(value) {
  return `${Math.round(value * 100)} %`;
}

function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  const power = Math.min(units.length - 1, Math.max(0, Math.floor(Math.log10(value || 1) / 3)));
  return `${+(value / 1000 ** power).toPrecision(3)} ${units[power]}`;
}

/** `show(value)`, or a dash for what is not known. */
function orDash(value, show) {
  return value === undefined || value === null ? "–" : show(value);
}

function clock(at) {
  return new Date(at * 1000).toLocaleTimeString("en-GB");
}

// Charts

const CHARTS = [
  {title: "Output tokens/s", lines: {"": p => p.output_tokens_s ?? 0}, show: short},
  {title: "Prompt tokens/s", lines: {"": p => p.prompt_tokens_s ?? 0}, show: short},
  {title: "Requests", lines: {running: p => p.running ?? 0, waiting: p => p.waiting ?? 0}, show: short},
  {title: "Time to first token", lines: {p50: p => p.ttft?.p50, p99: p => p.ttft?.p99}, show: seconds},
  {title: "Between tokens", lines: {p50: p => p.itl?.p50, p99: p => p.itl?.p99}, show: seconds},
  {title: "KV cache in use", lines: {"": p => p.kv_usage}, show: percent, top: 1},
  {title: "Prefix hits", lines: {"": p => p.hit_rate}, show: percent, top: 1},
  {title: "KV read of others/s", lines: {"": p => p.transfer_bytes_s ?? 0}, show: bytes},
  {title: "Failed requests", lines: {"": p => p.failed ?? 0}, show: short},
];

/** A chart: `root` goes into the page, `update(points, now)` shows them. Touching it shows a point's values. */
class Chart {
  constructor({title, lines, show, top}) {
    Object.assign(this, {lines: Object.entries(lines), show, top, points: [], now: 0, span: SPAN_S});
    this.value = make("span", "value");
    this.high = make("span");
    this.svg = draw("svg", {viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img"});
    this.svg.ariaLabel = title;
    this.svg.append(draw("path", {class: "base", d: `M0 ${HEIGHT - 1}H${WIDTH}`}));
    this.pointer = draw("path", {class: "pointer", d: ""});
    this.paths = this.lines.map((_, i) => draw("path", {class: `line-${i}`, d: ""}));
    this.svg.append(this.pointer, ...this.paths);
    this.svg.onpointermove = event => this.showValue(event);
    this.svg.onpointerleave = () => this.showValue(null);
    this.since = make("span");
    const axis = make("small", "", this.since, this.high, make("span", "", "now"));
    this.root = make("figure", "chart", make("figcaption", "", make("b", "", title), this.value), this.svg, axis);
  }

  update(points, now) {
    const span = Math.min(SPAN_S, Math.max(LEAST_SPAN_S, now - (points[0]?.at ?? now)));
    Object.assign(this, {points, now, span});
    this.since.textContent = `${seconds(span)} ago`;
    const values = points.flatMap(point => this.lines.map(([, of]) => of(point) ?? 0));
    const top = this.top ?? Math.max(...values, 1e-9);
    const y = value => (HEIGHT - 2 - value / top * (HEIGHT - 6)).toFixed(1);
    this.lines.forEach(([, of], i) => {
      let d = "", pen = "M";
      for (const point of points) {
        const value = of(point);
        if (value === undefined || value === null) {
          pen = "M";
          continue;
        }
        d += `${pen}${this.x(point).toFixed(1)} ${y(value)}`;
        pen = "L";
      }
      this.paths[i].setAttribute("d", d);
    });
    this.high.textContent = values.some(Boolean) ? `top ${this.show(top)}` : "";
    this.showValue(null);
  }

  x({at}) {
    return (1 - (this.now - at) / this.span) * WIDTH;
  }

  /** Writes the values at the pointer, or the last ones. */
  showValue(event) {
    let point = this.points.at(-1);
    if (event) {
      const box = this.svg.getBoundingClientRect(), x = (event.clientX - box.left) / box.width * WIDTH;
      const nearer = (a, b) => (Math.abs(this.x(b) - x) < Math.abs(this.x(a) - x) ? b : a);
      if (point) point = this.points.reduce(nearer);
    }
    this.pointer.setAttribute("d", event && point ? `M${this.x(point).toFixed(1)} 0V${HEIGHT}` : "");
    const parts = point ? this.lines.map(([name, of], i) =>
      make("span", "", `${name} `, make("i", `line-${i}`, orDash(of(point), this.show)), " ")) : ["–"];
    this.value.replaceChildren(...(event && point ? [`${clock(point.at)} `] : []), ...parts);
  }
}
