// The plot of losses: SVG, redrawn whole when what it shows changes; only the read-out moves without a redraw.
//
// A run has two lines, `held` and `train`, each a list of losses beside lists of steps, FLOPs and seconds. The plot's
// state is the axis, whether it is logarithmic, the part of it in view (null: all) and the runs that are hidden.

const MARGIN = { left: 50, right: 14, top: 22, bottom: 44 };
const CLIFF_SHARE = 0.1; // of a run's steps: the fall from the first loss, which would flatten all that follows
const FEW = 5; // points: with fewer all are shown, the cliff too
const DOTS = 60; // in a line with more points in view than these, dots would run together
const DRAG = 6; // pixels: less is a click
const LABELLED = 60; // pixels that the words above a stage need

/** An SVG element with these attributes, inside `parent`. */
function draw(parent, tag, attributes = {}, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text) element.textContent = text;
  return parent.appendChild(element);
}

/** The classes of a run's mark: seven colours, and past them the same again with other strokes. */
function look(kind, index) {
  return `${kind} run-${index % 7} dash-${Math.floor(index / 7) % 4}`;
}

/** A number with a fixed number of decimals and commas between the thousands. */
function decimals(value, digits) {
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** About `count` round values from `low` to `high`, with their texts. */
function linearTicks(low, high, count, whole) {
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = Math.max(whole ? 1 : 0, power * [1, 2, 5, 10].find((factor) => factor * power >= raw * 0.999));
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const ticks = [];
  // + 0: the ceiling of a small negative number is -0, which would be written so.
  for (let n = Math.ceil(low / step - 1e-9) + 0; n * step <= high + 1e-9 * step; n++)
    ticks.push([n * step, decimals(n * step, digits)]);
  return ticks;
}

/** Powers of ten from `low` to `high`, with 2 and 5 between them where there is room. */
function logTicks(low, high, count) {
  const decades = Math.log10(high / low);
  const factors = decades < count / 3 ? [1, 2, 5] : [1];
  const every = Math.max(1, Math.ceil(decades / count));
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += every)
    for (const factor of factors) {
      const value = factor * 10 ** power;
      if (value >= low && value <= high) ticks.push([value, decimals(value, Math.max(0, -power))]);
    }
  return ticks.length > 1 ? ticks : linearTicks(low, high, count, false);
}

/** The plot of `runs` in `box`; `readout(x, rows)` is called when the cursor moves, with x null when it leaves. */
function makePlot(box, runs, axes, readout) {
  const state = { axis: axes[0], log: false, view: null, hidden: new Set(), cursor: null };
  const svg = draw(box, "svg", { tabindex: 0, role: "img", "aria-describedby": "keys" });
  let shown, scales, marks; // of the last redraw: the runs in view with their points, the scales, the cursor's group

  const positions = (line) => line[state.axis.key].map((x) => (x === null ? null : x / state.axis.size));
  const usable = (x, loss) => x !== null && loss !== null && (!state.log || x > 0);

  /** The points of a line, with null for those that cannot be drawn: a gap. */
  function points(line) {
    return positions(line).map((x, n) => (usable(x, line.loss[n]) ? { x, y: line.loss[n], step: line.step[n] } : null));
  }

  function makeShown() {
    const visible = runs.map((run, index) => ({ run, index })).filter(({ index }) => !state.hidden.has(index));
    return visible.map(({ run, index }) => ({ run, index, held: points(run.held), train: points(run.train) }));
  }

  /** The whole extent of the axis: it belongs to all runs, so that hiding one moves nothing. */
  function extent() {
    const all = runs.flatMap((run) => [run.held, run.train]).flatMap(positions);
    const usableOnes = all.filter((x) => x !== null && (!state.log || x > 0));
    const high = usableOnes.reduce((a, b) => Math.max(a, b), 0) || 1;
    const low = state.log ? usableOnes.reduce((a, b) => Math.min(a, b), high) : 0;
    return low < high ? [low, high] : [high / 2, high * 2];
  }

  /** The losses in view; in the whole view without the early cliff and without a divergence above the start. */
  function lossRange([left, right]) {
    const lines = shown.flatMap(({ held, train }) => [held.filter(Boolean), train.filter(Boolean)]);
    const inView = lines.flat().filter(({ x }) => x >= left && x <= right);
    if (!inView.length) return [0, 1];
    const least = (values) => values.reduce((a, b) => Math.min(a, b));
    const most = (values) => values.reduce((a, b) => Math.max(a, b));
    const cliff = CLIFF_SHARE * most(inView.map(({ step }) => step));
    const late = inView.filter(({ step }) => step >= cliff);
    const cut = !state.view && !state.log && late.length >= FEW;
    const losses = (cut ? late : inView).map(({ y }) => y);
    const low = least(losses);
    const start = most(lines.filter((line) => line.length).map((line) => line[0].y));
    const high = state.view ? most(losses) : Math.max(low, Math.min(most(losses), start));
    const margin = 0.06 * (high - low) || 0.05 * Math.abs(high) || 0.5;
    return [low - margin, high + margin];
  }

  function makeScales() {
    const width = Math.max(240, box.clientWidth);
    const height = Math.round(Math.min(460, Math.max(280, 0.5 * width)));
    const inner = [width - MARGIN.left - MARGIN.right, height - MARGIN.top - MARGIN.bottom];
    const x = state.view ?? extent();
    const y = lossRange(x);
    const bend = state.log ? Math.log : (value) => value;
    const straighten = state.log ? Math.exp : (value) => value;
    const [from, to] = x.map(bend);
    const [right, bottom] = [width - MARGIN.right, height - MARGIN.bottom];
    const toX = (value) => MARGIN.left + ((bend(value) - from) / (to - from)) * inner[0];
    return {
      width, height, right, bottom, x, y, toX,
      upright: (value) => ({ x1: toX(value), x2: toX(value), y1: MARGIN.top, y2: bottom }),
      toY: (value) => MARGIN.top + ((y[1] - value) / (y[1] - y[0])) * inner[1],
      fromX: (pixel) => straighten(from + ((pixel - MARGIN.left) / inner[0]) * (to - from)),
    };
  }

  function drawAxes() {
    const { width, height, x, y, toX, toY, right, bottom } = scales;
    const group = draw(svg, "g", { class: "axes" });
    for (const [value, text] of linearTicks(...y, 5, false)) {
      draw(group, "line", { class: "grid", x1: MARGIN.left, x2: right, y1: toY(value), y2: toY(value) });
      draw(group, "text", { x: MARGIN.left - 8, y: toY(value) + 4, "text-anchor": "end" }, text);
    }
    const count = Math.max(2, Math.floor(width / 110));
    for (const [value, text] of state.log ? logTicks(...x, count) : linearTicks(...x, count, state.axis.whole)) {
      draw(group, "line", { class: "tick", x1: toX(value), x2: toX(value), y1: bottom, y2: bottom + 5 });
      const anchor = toX(value) > right - 12 ? "end" : "middle"; // the last text ends inside the picture
      draw(group, "text", { x: Math.min(toX(value), right), y: bottom + 19, "text-anchor": anchor }, text);
    }
    draw(group, "line", { class: "base", x1: MARGIN.left, x2: right, y1: bottom, y2: bottom });
    draw(group, "text", { class: "name", x: right, y: height - 6, "text-anchor": "end" }, state.axis.label);
    draw(group, "text", { class: "name", x: 0, y: 12 }, "loss");
  }

  /** Where each stage but the last ends; with one staged run in view, also how many layers each trains. */
  function drawStages(area) {
    const { toX, x: [left, right], upright } = scales;
    const staged = shown.filter(({ run }) => run.stages.length > 1);
    for (const { run, index } of staged) {
      const ends = positions({ [state.axis.key]: run.stages.map((stage) => stage[state.axis.key]) });
      for (const end of ends.slice(0, -1))
        if (end !== null && end >= left && end <= right)
          draw(area, "line", { class: look("stage", index), "data-run": index, ...upright(end) });
      if (staged.length > 1) continue;
      run.stages.forEach((stage, n) => {
        const from = toX(Math.max(left, n ? ends[n - 1] : left));
        const to = toX(Math.min(right, ends[n]));
        if (to - from < LABELLED) return;
        const place = { x: (from + to) / 2, y: MARGIN.top - 6, "text-anchor": "middle" };
        draw(svg, "text", { class: "size", ...place }, stage.text);
      });
    }
  }

  function drawLine(area, line, kind, index) {
    const { toX, toY, x: [left, right] } = scales;
    let path = "";
    let pen = "M";
    for (const point of line) {
      if (point) path += `${pen}${toX(point.x).toFixed(1)} ${toY(point.y).toFixed(1)}`;
      pen = point ? "L" : "M";
    }
    if (!path) return;
    if (!path.includes("L")) path += "h0"; // one point is a dot
    draw(area, "path", { class: look(kind, index), "data-run": index, d: path });
    if (kind !== "held") return;
    const inView = line.filter((point) => point && point.x >= left && point.x <= right);
    for (const { x, y } of inView.length > DOTS ? inView.slice(-1) : inView)
      draw(area, "circle", { class: look("dot", index), "data-run": index, cx: toX(x), cy: toY(y), r: 3 });
  }

  function redraw() {
    shown = makeShown();
    scales = makeScales();
    const { width, height, right, bottom } = scales;
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("aria-label", `Loss against ${state.axis.name} of ${runs.map((run) => run.name).join(", ")}`);
    const clip = draw(draw(svg, "defs"), "clipPath", { id: "inside" });
    const [left, top] = [MARGIN.left - 4, MARGIN.top - 4]; // dots on the edge are whole
    draw(clip, "rect", { x: left, y: top, width: right + 4 - left, height: bottom - top });
    drawAxes();
    const area = draw(svg, "g", { class: "area", "clip-path": "url(#inside)" });
    drawStages(area);
    // The first run is drawn last: it is the one that others are compared with.
    for (const { index, held, train } of shown.toReversed()) {
      drawLine(area, train, "train", index);
      drawLine(area, held, "held", index);
    }
    marks = draw(svg, "g", { class: "marks", "clip-path": "url(#inside)" });
    point(state.cursor);
  }

  /** The point of a line nearest to x. */
  function nearest(line, x) {
    const far = (candidate) => Math.abs(scales.toX(candidate.x) - scales.toX(x));
    const nearer = (best, candidate) => (best && far(best) <= far(candidate) ? best : candidate);
    return line.filter(Boolean).reduce(nearer, null);
  }

  /** Put the cursor at x (null: take it away) and read the runs out there. */
  function point(x) {
    state.cursor = x;
    marks.replaceChildren();
    if (x === null || x < scales.x[0] || x > scales.x[1]) return readout(null, []);
    const { toX, toY, upright } = scales;
    draw(marks, "line", { class: "cursor", ...upright(x) });
    const rows = shown.map(({ run, index, held, train }) =>
      ({ index, name: run.name, held: nearest(held, x), train: nearest(train, x) }));
    for (const { held, index } of rows)
      if (held) draw(marks, "circle", { class: look("mark", index), cx: toX(held.x), cy: toY(held.y), r: 5 });
    return readout(x, rows, toX(x) / scales.width, state.axis);
  }

  function zoom(low, high) {
    const [left, right] = extent();
    const range = [Math.max(left, Math.min(low, high)), Math.min(right, Math.max(low, high))];
    if (range[1] - range[0] < 1e-6 * (right - left)) return;
    state.view = range[0] <= left && range[1] >= right ? null : range;
    redraw();
    box.dispatchEvent(new Event("zoom"));
  }

  function reset() {
    Object.assign(state, { view: null, cursor: null });
    redraw();
    box.dispatchEvent(new Event("zoom"));
  }

  /** Zoom by a factor around the cursor, or move the view by a share of its width. */
  function turn(factor, shift = 0) {
    const { toX, fromX } = scales;
    const [left, right] = scales.x.map(toX);
    const cursor = state.cursor === null ? NaN : toX(state.cursor);
    const middle = cursor >= left && cursor <= right ? cursor : (left + right) / 2;
    const moved = [left, right].map((edge) => middle + (edge - middle) / factor + shift * (right - left));
    const [first, last] = extent().map(toX);
    const back = Math.max(first - moved[0], 0) + Math.min(last - moved[1], 0); // what is past an end comes back
    zoom(...moved.map((edge) => fromX(edge + back)));
  }

  /** Move the cursor along the points that the visible runs were evaluated at. */
  function walk(direction) {
    const lines = shown.flatMap(({ held, train }) => (held.length ? held : train));
    const stops = [...new Set(lines.filter(Boolean).map(({ x }) => x))].sort((a, b) => a - b);
    const inView = stops.filter((x) => x >= scales.x[0] && x <= scales.x[1]);
    const here = state.cursor ?? (direction > 0 ? -Infinity : Infinity);
    const next = direction > 0 ? inView.find((x) => x > here) : inView.findLast((x) => x < here);
    if (next !== undefined) point(next);
  }

  const keys = {
    ArrowLeft: (event) => (event.shiftKey ? turn(1, -0.25) : walk(-1)),
    ArrowRight: (event) => (event.shiftKey ? turn(1, 0.25) : walk(1)),
    "+": () => turn(2), "=": () => turn(2), "-": () => turn(0.5), 0: reset, Escape: reset,
  };
  svg.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in keys)) return;
    event.preventDefault();
    keys[event.key](event);
  });

  const pixel = (event) => {
    const x = ((event.clientX - svg.getBoundingClientRect().left) * scales.width) / svg.getBoundingClientRect().width;
    return Math.min(scales.right, Math.max(MARGIN.left, x));
  };
  let pressed = null;
  svg.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    pressed = pixel(event);
    svg.setPointerCapture(event.pointerId);
  });
  svg.addEventListener("pointermove", (event) => {
    const here = pixel(event);
    point(scales.fromX(here));
    if (pressed === null || Math.abs(here - pressed) <= DRAG) return;
    const [x, width, height] = [Math.min(pressed, here), Math.abs(here - pressed), scales.bottom - MARGIN.top];
    draw(marks, "rect", { class: "chosen", x, y: MARGIN.top, width, height });
  });
  svg.addEventListener("pointerup", (event) => {
    const [from, to] = [pressed, pixel(event)];
    pressed = null;
    if (from !== null && Math.abs(to - from) > DRAG) zoom(scales.fromX(from), scales.fromX(to));
    else point(scales.fromX(to));
  });
  svg.addEventListener("pointercancel", () => { pressed = null; point(null); });
  // A finger leaves with every tap; what it read out stays.
  svg.addEventListener("pointerleave", (event) => {
    if (pressed === null && event.pointerType !== "touch") point(null);
  });
  svg.addEventListener("dblclick", reset);
  svg.addEventListener("blur", () => point(null));
  redraw();
  new ResizeObserver(() => { if (box.clientWidth !== scales.width) redraw(); }).observe(box);

  return {
    reset,
    zoomed: () => state.view !== null,
    setAxis: (axis) => { state.axis = axis; reset(); },
    setLog: (log) => { state.log = log; reset(); },
    show: (index, visible) => { state.hidden[visible ? "delete" : "add"](index); redraw(); },
    /** Let the lines of all runs but this one step back (null: of none). */
    emphasise: (index) => {
      for (const line of svg.querySelectorAll("[data-run]"))
        line.classList.toggle("faint", index !== null && line.dataset.run !== String(index));
    },
  };
}
