// TTFT and TPOT of the last minutes: numbers, and a line of the median under the 95th percentile.

import { byId, h, svg, setText } from "./dom.js";
import { ms, plural } from "./format.js";

const KINDS = [
  ["ttft", "Time to first token"],
  ["tpot", "Time per output token"],
];
const WIDTH = 300;
const HEIGHT = 56;

export class Latency {
  #charts = new Map();

  constructor() {
    for (const [name, title] of KINDS) {
      const chart = new Chart(title);
      this.#charts.set(name, chart);
      byId("charts").append(chart.element);
    }
  }

  show(told) {
    for (const [name, chart] of this.#charts) chart.show(told[name]);
  }
}

class Chart {
  constructor(title) {
    const number = (label) => h("div", {}, h("dt", {}, label), h("dd", {}, "–"));
    this.numbers = ["p50", "p90", "p99"].map(number);
    this.note = h("p", { class: "aside" }, "nothing measured yet");
    this.area = svg("path", { class: "area" });
    this.high = svg("g", { class: "high" });
    this.low = svg("g", { class: "low" });
    this.top = h("span", { class: "chart-top" });
    this.element = h("div", { class: "chart" },
      h("h3", {}, title),
      h("dl", {}, this.numbers),
      h("div", { class: "chart-plot", "aria-hidden": "true" },
        svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", focusable: "false" },
          this.high, this.low),
        this.top),
      this.note);
  }

  show(told) {
    const values = [told.p50_ms, told.p90_ms, told.p99_ms];
    this.numbers.forEach((element, index) => setText(element.lastChild, ms(values[index])));
    setText(this.note, told.count ? `of ${plural(told.count, "answer")}` : "nothing measured yet");
    const most = Math.max(...told.p95_series_ms.filter((value) => value !== null), 0);
    setText(this.top, most ? ms(most) : "");
    this.high.replaceChildren(...columns(told.p95_series_ms, most));
    this.low.replaceChildren(...columns(told.p50_series_ms, most));
  }
}

// A column for each five seconds in which something was measured.
function columns(series, most) {
  const step = WIDTH / series.length;
  return series.flatMap((value, index) => {
    if (value === null) return [];
    const height = Math.max(2, (value / most) * (HEIGHT - 2));
    return [svg("rect", { x: index * step + 0.5, y: HEIGHT - height, width: step - 1, height, rx: 1 })];
  });
}
