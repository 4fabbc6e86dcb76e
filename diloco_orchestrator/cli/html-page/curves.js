// Draws each <figure data-curves> of a page with uPlot: hover, zoom, log scale, synced cursors, keyboard. Without this
// script the figure's SVG stays. All text of a run becomes a text node or an attribute, never markup.
(function () {
  "use strict";
  const plots = new Set();
  const words = (v) => {
    if (v == null) return "";
    const size = Math.abs(v);
    return size !== 0 && (size >= 1e6 || size < 1e-3) ? v.toExponential(2) : String(+v.toPrecision(5));
  };
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const made = (tag, within, attributes) => {
    const element = within.appendChild(document.createElement(tag));
    for (const name in attributes) element.setAttribute(name, attributes[name]);
    return element;
  };

  function table(told) {
    const tables = told.lines.map((line) => [line.x, line.y]);
    const xs = [...new Set(told.lines.flatMap((line) => line.x))].sort((a, b) => a - b);
    if (told.limit !== null) tables.push([xs, xs.map(() => told.limit)]);
    return uPlot.join(tables);
  }

  function options(told, width, log) {
    const quiet = style("--quiet"), grid = { stroke: style("--grid"), width: 1 };
    const axis = { stroke: quiet, grid, ticks: grid, font: "12px system-ui, sans-serif" };
    const series = told.lines.map((line) => ({
      label: line.name, stroke: line.colour, width: 2, points: { fill: style("--back") }, value: (u, v) => words(v),
    }));
    if (told.limit !== null) {
      series.push({ label: "threshold", stroke: "#b91c1c", dash: [6, 4], points: { show: false }, value: (u, v) => words(v) });
    }
    const steps = [1, 2, 5].flatMap((n) => [...Array(13).keys()].map((power) => n * 10 ** power)).sort((a, b) => a - b);
    return {
      width, height: 240,
      scales: { x: { time: false }, y: { distr: log ? 3 : 1 } },
      cursor: { sync: { key: told.axis }, drag: { x: true, y: false }, y: false,
                points: { fill: (u, i) => series[i - 1].stroke } },
      axes: [
        { ...axis, label: told.axis, labelSize: 18, labelFont: axis.font, size: 34, values: (u, vs) => vs.map(words),
          ...(told.whole ? { incrs: steps } : {}) },
        { ...axis, size: 62, values: (u, vs) => vs.map(words) },
      ],
      series: [{ label: told.axis, value: (u, v) => words(v) }, ...series],
    };
  }

  function zoom(plot, min, max) {
    for (const each of plots) if (each.told.axis === plot.told.axis) each.now.setScale("x", { min, max });
  }

  function whole(plot) {
    for (const each of plots) {
      if (each.told.axis !== plot.told.axis) continue;
      const xs = each.now.data[0];
      each.now.setScale("x", { min: xs[0], max: xs[xs.length - 1] });
    }
  }

  function draw(plot) {
    const before = plot.now && plot.now.scales.x, width = plot.box.clientWidth;
    if (plot.now) plot.now.destroy();
    plot.now = new uPlot(options(plot.told, width, plot.log), table(plot.told), plot.box);
    if (before && before.min != null) plot.now.setScale("x", { min: before.min, max: before.max });
    for (const label of plot.box.querySelectorAll(".u-legend th")) label.tabIndex = 0;
  }

  function move(plot, to) {
    const [xs, ...ys] = plot.now.data, { min, max } = plot.now.scales.x;
    const first = xs.findIndex((x) => x >= min), last = xs.findLastIndex((x) => x <= max);
    plot.at = Math.min(last, Math.max(first, to));
    plot.now.setCursor({ left: plot.now.valToPos(xs[plot.at], "x"), top: 20 }, true, true);
    const values = ys.map((y, i) => (y[plot.at] == null ? "" : `${plot.now.series[i + 1].label} ${words(y[plot.at])}`));
    plot.said.textContent = [`${plot.told.axis} ${words(xs[plot.at])}`, ...values.filter(Boolean)].join(", ");
  }

  function key(plot, event) {
    if (event.target.tagName === "TH") {
      if (event.key === "Enter" || event.key === " ") event.target.click(), event.preventDefault();
      return;
    }
    if (event.target !== plot.box || event.ctrlKey || event.metaKey || event.altKey) return;
    const { min, max } = plot.now.scales.x, xs = plot.now.data[0];
    const at = plot.at === undefined ? (min + max) / 2 : xs[plot.at];
    const actions = {
      ArrowLeft: () => move(plot, (plot.at ?? xs.length) - 1),
      ArrowRight: () => move(plot, (plot.at ?? -1) + 1),
      Home: () => move(plot, 0),
      End: () => move(plot, xs.length - 1),
      "+": () => zoom(plot, at - (at - min) / 2, at + (max - at) / 2),
      "-": () => zoom(plot, Math.max(xs[0], at - (at - min) * 2), Math.min(xs[xs.length - 1], at + (max - at) * 2)),
      0: () => whole(plot),
      l: () => plot.toggle.click(),
    };
    if (!(event.key in actions)) return;
    actions[event.key]();
    event.preventDefault();
  }

  function build(figure) {
    const told = JSON.parse(figure.dataset.curves), plot = { told, log: false };
    const tools = made("div", figure, { class: "tools" });
    plot.toggle = made("button", tools, { type: "button", "aria-pressed": "false" });
    plot.toggle.textContent = "log scale";
    plot.toggle.disabled = told.lines.some((line) => line.y.some((y) => y <= 0));
    const back = made("button", tools, { type: "button" });
    back.textContent = "whole range";
    plot.box = made("div", figure, { class: "plot", tabindex: "0", role: "group" });
    plot.box.setAttribute("aria-label", `${told.what}: arrow keys read values, + and - zoom, 0 shows all, l is the log scale`);
    plot.said = made("output", figure, { class: "said", "aria-live": "polite" });
    figure.classList.add("live");
    draw(plot);
    plots.add(plot);
    plot.toggle.addEventListener("click", () => {
      plot.log = !plot.log;
      plot.toggle.setAttribute("aria-pressed", String(plot.log));
      draw(plot);
    });
    back.addEventListener("click", () => whole(plot));
    plot.box.addEventListener("keydown", (event) => key(plot, event));
    new ResizeObserver(() => plot.now.setSize({ width: plot.box.clientWidth, height: 240 })).observe(plot.box);
  }

  for (const figure of document.querySelectorAll("figure[data-curves]")) build(figure);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plots.forEach(draw));
})();
