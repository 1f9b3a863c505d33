// The page around the plot: its controls, its legend, the read-out and the tables. All text is set as text.

/** An HTML element with these properties and children; strings become text. */
function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

/** A line in the run's colour, as the plot draws it. */
function swatch(index) {
  const nowhere = document.createDocumentFragment();
  const picture = draw(nowhere, "svg", { class: "swatch", viewBox: "0 0 22 10", "aria-hidden": true });
  draw(picture, "path", { class: look("held", index), d: "M1 5H21" });
  return picture;
}

/** A table's cell: text, beside its run's colour and before a bar where it has them. */
function cell(tag, content, words) {
  const { text, run, bar } = typeof content === "string" ? { text: content } : content;
  const element = make(tag, { className: words ? "words" : "" });
  if (run !== undefined && bar === undefined) element.append(swatch(run));
  if (bar !== undefined) {
    const length = make("i", { className: look("bar", run) });
    length.style.setProperty("--length", bar);
    element.append(length);
  }
  element.append(words ? make("span", {}, text) : text);
  return element;
}

/** Fill the place of a sheet with its table, or with what the place says when there is nothing. */
function fill(place, sheet) {
  if (!sheet.lines.length) return place.append(make("p", { className: "quiet" }, place.dataset.empty));
  const head = make("tr", {}, ...sheet.headings.map((heading, n) => cell("th", heading, sheet.words[n])));
  for (const heading of head.children) heading.scope = "col";
  const lines = sheet.lines.map((line) =>
    make("tr", {}, ...line.map((content, n) => cell(n ? "td" : "th", content, sheet.words[n]))));
  for (const line of lines) line.firstChild.scope = "row";
  const table = make("table", {}, make("thead", {}, head), make("tbody", {}, ...lines));
  // A table wider than the page scrolls in a box of its own, with the keyboard too.
  const box = make("div", { className: "scroll", tabIndex: 0, role: "region", ariaLabel: place.dataset.name }, table);
  return place.append(box, ...sheet.notes.map((note) => make("p", { className: "quiet" }, note)));
}

/** The read-out beside the cursor: every run's losses at the points nearest to it. */
function makeReadout(box) {
  const panel = make("div", { className: "readout", role: "status", hidden: true });
  box.append(panel);
  const place = (x, axis) => (axis.whole ? decimals(x, 0) : String(Number(x.toPrecision(4))));
  return (x, rows, share, axis) => {
    panel.hidden = x === null || !rows.length;
    if (panel.hidden) return panel.replaceChildren();
    const here = axis.whole ? `step ${place(x, axis)}` : `${place(x, axis)} ${axis.unit}`;
    const line = (tag, ...cells) => make("tr", {}, ...cells.map((content) => make(tag, {}, content)));
    const lines = rows.map(({ index, name, held, train }) => line("td",
      make("span", {}, swatch(index), name),
      held ? held.y.toFixed(3) : "–",
      held ? `at ${place(held.x, axis)}` : "",
      train ? train.y.toFixed(3) : "–"));
    panel.classList.toggle("left", share > 0.5);
    return panel.replaceChildren(make("table", {}, line("th", here, "held-out", "", "train"), ...lines));
  };
}

function start() {
  const { axes, runs, sheets } = JSON.parse(document.getElementById("data").textContent);
  const names = runs.map((run) => run.name).join(", ");
  document.title = `${names} – raptr report`;
  document.getElementById("names").textContent = names;

  for (const place of document.querySelectorAll("[data-sheet]")) fill(place, sheets[place.dataset.sheet]);
  // Of one run there are no differences to show.
  document.getElementById("differences").hidden = runs.length < 2;

  const box = document.getElementById("plot");
  const plot = makePlot(box, runs, axes, makeReadout(box));

  axes.forEach((axis, index) => {
    const choice = make("input", { type: "radio", name: "axis", value: axis.key, checked: index === 0 });
    choice.addEventListener("change", () => plot.setAxis(axis));
    document.getElementById("axis").append(make("label", {}, choice, make("span", {}, axis.name)));
  });
  document.getElementById("log").addEventListener("change", (event) => plot.setLog(event.target.checked));
  const reset = document.getElementById("reset");
  reset.addEventListener("click", plot.reset);
  box.addEventListener("zoom", () => { reset.disabled = !plot.zoomed(); });

  runs.forEach((run, index) => {
    const final = run.final === null ? "" : run.final.toFixed(3);
    const entry = make("button", { type: "button", ariaPressed: "true" }, swatch(index));
    entry.append(make("b", {}, run.name), ` ${final}`);
    entry.addEventListener("click", () => {
      entry.ariaPressed = String(entry.ariaPressed !== "true");
      plot.show(index, entry.ariaPressed === "true");
    });
    for (const event of ["pointerenter", "focus"]) entry.addEventListener(event, () => plot.emphasise(index));
    for (const event of ["pointerleave", "blur"]) entry.addEventListener(event, () => plot.emphasise(null));
    document.getElementById("legend").append(entry);
  });

  const theme = document.getElementById("theme");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light")) === "dark";
  const nameTheme = () => { theme.textContent = isDark() ? "Light" : "Dark"; };
  theme.addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    nameTheme();
  });
  dark.addEventListener("change", nameTheme);
  nameTheme();

  // On paper nothing can be unfolded.
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((part) => { part.open = true; }));
}

start();
