"use strict";
const page = document.documentElement;
const all = (selector, within = document) => [...within.querySelectorAll(selector)];

// Theme: that of the system, until the button chooses another.
const systemDark = matchMedia("(prefers-color-scheme: dark)");
const themeButton = document.getElementById("theme");
const theme = () => page.dataset.theme ?? (systemDark.matches ? "dark" : "light");
const other = () => (theme() === "dark" ? "light" : "dark");
function retheme() {
  themeButton.textContent = other() === "dark" ? "Dark" : "Light";
  all("[data-chart].drawn").forEach(draw);
}
themeButton.hidden = false;
themeButton.addEventListener("click", () => { page.dataset.theme = other(); retheme(); });
systemDark.addEventListener("change", retheme);

// Charts: plotly.js lies compressed in the page, and is unpacked when the first chart comes into view.
const charts = JSON.parse(document.getElementById("charts").textContent);
// The other buttons are left out: one of them sends the chart to a server.
const chartOptions = { responsive: true, displaylogo: false, modeBarButtons: [["toImage"]] };
let plotly;
async function unpack() {
  const packed = atob(document.getElementById("plotly").textContent);
  const bytes = Uint8Array.from(packed, (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);
}
async function draw(element) {
  await (plotly ??= unpack());
  const { data, layout } = structuredClone(charts.figures[element.dataset.chart]);
  const template = charts.templates[theme()];
  await Plotly.react(element, data, { ...layout, template }, chartOptions);
  element.classList.add("drawn");
}
const inView = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    if (isIntersecting) { inView.unobserve(target); draw(target); }
  }
}, { rootMargin: "300px" });
all("[data-chart]").forEach((element) => inView.observe(element));

// Tables: a header sorts by its column, and a field above a table leaves the rows that contain its text.
const collator = new Intl.Collator(undefined, { numeric: true });
const key = (row, column) => row.cells[column]?.dataset.value ?? row.cells[column]?.textContent ?? "";
const byNumber = (a, b) => (a === "" ? -Infinity : Number(a)) - (b === "" ? -Infinity : Number(b));
function sort(header) {
  const table = header.closest("table"), body = table.tBodies[0], column = header.cellIndex;
  const numeric = all("tr", body).every((row) => row.cells[column]?.dataset.value !== undefined);
  const descending = header.ariaSort ? header.ariaSort === "ascending" : numeric;
  const compare = numeric ? byNumber : collator.compare;
  const rows = [...body.rows].sort((a, b) => (descending ? -1 : 1) * compare(key(a, column), key(b, column)));
  all("th", table).forEach((each) => each.removeAttribute("aria-sort"));
  header.ariaSort = descending ? "descending" : "ascending";
  body.append(...rows);
}
function addFilter(table) {
  const label = document.createElement("label"), field = document.createElement("input");
  const found = document.createElement("output");
  field.type = "search";
  field.addEventListener("input", () => {
    const text = field.value.toLowerCase(), rows = [...table.tBodies[0].rows];
    for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(text);
    found.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} rows`;
  });
  label.append("Filter ", field, found);
  label.className = "filter";
  table.parentElement.before(label);
}
for (const table of all("table")) {
  for (const header of all("thead th", table)) {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...header.childNodes);
    button.addEventListener("click", () => sort(header));
    header.append(button);
  }
  if ("filter" in table.dataset && table.tBodies[0].rows.length > 10) addFilter(table);
}

// The tree of modules.
const tree = document.getElementById("tree");
const open = (nodes, value) => nodes.forEach((node) => { node.open = value; });
document.getElementById("open-modules").addEventListener("click", () => open(all(".module", tree), true));
document.getElementById("close-modules").addEventListener("click", () => open(all("details", tree), false));
function show(node, text) {
  const own = node.querySelector(":scope > summary > .name, :scope > .name").textContent.toLowerCase().includes(text);
  const kids = all(":scope > .kids > *", node).map((kid) => show(kid, own ? "" : text));
  const inside = kids.some(Boolean);
  node.hidden = !(own || inside);
  if (text && !own && inside) node.open = true;
  return own || inside;
}
document.getElementById("find").addEventListener("input", ({ target }) => {
  all(":scope > details", tree).forEach((node) => show(node, target.value.toLowerCase()));
});

// The navigation marks the section that is being read.
const links = new Map(all("nav a").map((link) => [link.hash.slice(1), link]));
const reading = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    if (!isIntersecting) continue;
    links.forEach((link) => link.removeAttribute("aria-current"));
    const link = links.get(target.id), nav = link.closest("nav");
    link.setAttribute("aria-current", "true");
    nav.scrollLeft = link.offsetLeft - nav.offsetLeft; // on a phone it is one row
  }
}, { rootMargin: "-20% 0px -75% 0px" });
all("main > section").forEach((section) => reading.observe(section));

// Paper is light.
addEventListener("beforeprint", () => {
  page.dataset.shown = page.dataset.theme ?? "";
  page.dataset.theme = "light";
  retheme();
});
addEventListener("afterprint", () => {
  if (page.dataset.shown) page.dataset.theme = page.dataset.shown;
  else delete page.dataset.theme;
  retheme();
});
retheme();
