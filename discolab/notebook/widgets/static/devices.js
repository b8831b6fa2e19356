// What each worker does and uses: a table whose rows stay, and whose cells are set in place.

const SPARK = { wide: 60, high: 20 };
const COLUMNS = [
  ["worker", "worker"],
  ["state", "state"],
  ["doing", "doing"],
  ["queued", "queued"],
  ["cpu", "CPU"],
  ["memory", "memory"],
  ["gpu", "GPU"],
];

// A line over the last minute; where nobody looked there is a gap.
function sparkline() {
  const ns = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(ns, "svg");
  svg.setAttribute("viewBox", `0 0 ${SPARK.wide} ${SPARK.high}`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("class", "dd-spark");
  const [area, line] = ["dd-area", "dd-line"].map((name) => {
    const path = document.createElementNS(ns, "path");
    path.setAttribute("class", name);
    svg.append(path);
    return path;
  });
  return {
    svg,
    update(values, most, label) {
      let outline = "", filled = "", run = [];
      const close = () => {
        if (run.length > 1) {
          const points = run.map(([x, y]) => `${x},${y}`).join(" L");
          outline += `M${points} `;
          filled += `M${run[0][0]},${SPARK.high} L${points} L${run.at(-1)[0]},${SPARK.high} Z `;
        }
        run = [];
      };
      const start = SPARK.wide - values.length;
      values.forEach((value, i) => {
        if (value == null) return close();
        const y = SPARK.high - 1 - (SPARK.high - 2) * Math.min(1, value / most);
        run.push([start + i + 0.5, Math.round(10 * y) / 10]);
      });
      close();
      line.setAttribute("d", outline);
      area.setAttribute("d", filled);
      svg.setAttribute("aria-label", label);
      svg.style.visibility = outline ? "visible" : "hidden";
    },
  };
}

function seen(values) {
  return values.filter((value) => value != null);
}

function meter(kind) {
  const spark = sparkline();
  const value = element("span", { class: "dd-value" });
  const more = element("span", { class: "dd-more" });
  const cell = element("td", { role: "cell", class: `dd-${kind}` },
    element("div", { class: "dd-meter" }, spark.svg, element("div", {}, value, more)));
  return { cell, spark, value, more };
}

function deviceRow() {
  const number = element("span", { class: "dd-rank" });
  const device = element("span", { class: "dd-device" });
  const worker = element("th", { role: "rowheader", scope: "row" }, number, device);
  const symbol = element("span", { class: "dd-symbol", "aria-hidden": "true" });
  const state = element("span", { class: "dd-word" });
  const pill = element("span", { class: "dd-pill" }, symbol, state);
  const age = element("span", { class: "dd-age" });
  const words = element("div", { class: "dd-words" });
  const count = element("span"), unit = element("span", { class: "dd-unit" }, " queued");
  const queued = element("td", { role: "cell", class: "dd-queued" }, count, unit);
  const [cpu, memory] = [meter("cpu"), meter("memory")];
  const gpu = element("td", { role: "cell", class: "dd-gpu" });
  const row = element("tr", { role: "row" }, worker,
    element("td", { role: "cell", class: "dd-state" }, pill, age),
    element("td", { role: "cell", class: "dd-doing" }, words),
    queued, cpu.cell, memory.cell, gpu);
  let said = "";
  return {
    row,
    update(one, colours) {
      row.style.setProperty("--rank", one.colour);
      setText(number, String(one.rank));
      setText(device, one.device);
      device.title = one.name || one.device;
      row.dataset.state = one.state;
      row.classList.toggle("dd-stuck", one.stuck);
      setText(symbol, one.symbol);
      setText(state, one.state);
      setText(age, one.age);
      const now = JSON.stringify([one.doing, one.held]);
      if (now !== said) {
        said = now;
        // in one element: the box that cuts off lines would take each part, and its spaces, apart
        words.replaceChildren(element("span", {}, ...doingWords(one, colours)));
        words.title = words.textContent;
      }
      setText(count, one.queued ? String(one.queued) : "");
      unit.hidden = !one.queued;
      setText(cpu.value, one.cpu);
      const cores = seen(one.cores);
      cpu.spark.update(one.cores, Math.max(100, ...cores),
        cores.length ? `last minute: ${Math.min(...cores)} % to ${Math.max(...cores)} %` : "");
      setText(memory.value, one.memory);
      setText(memory.more, one.more.split(", ").slice(1).join(", "));
      memory.cell.title = one.more;
      const bytes = seen(one.bytes);
      memory.spark.update(one.bytes, Math.max(1, ...bytes) * 1.1,
        bytes.length ? `last minute: ${Math.min(...bytes)} to ${Math.max(...bytes)} MiB` : "");
      setText(gpu, one.gpu);
    },
  };
}

// What it does and whom it waits for, then who waits for it: words, each followed by ranks.
function doingWords(one, colours) {
  const drawn = (pieces) => pieces.flatMap(([words, ranks]) =>
    [words, ...ranks.map((rank) => chip(rank, colours[rank] ?? "currentColor"))]);
  if (!one.held.length) return drawn(one.doing);
  return [...drawn(one.doing), one.doing.length ? " · " : "",
    element("span", { class: "dd-held" }, ...drawn(one.held))];
}

export default {
  render: disco((root) => {
    const title = element("span", { class: "dd-title" });
    const notice = element("span", { class: "dd-notice", role: "status" });
    const dead = element("div", { class: "dd-dead", role: "alert", hidden: true });
    const body = element("tbody", { role: "rowgroup" });
    const table = element("table", { role: "table", "aria-label": "workers" },
      element("thead", { role: "rowgroup" }, element("tr", { role: "row" },
        ...COLUMNS.map(([key, words]) =>
          element("th", { role: "columnheader", scope: "col", class: `dd-${key}` }, words)))),
      body);
    const foot = element("div", { class: "dd-foot" });
    root.append(element("div", { class: "dd" },
      element("div", { class: "dd-head" }, element("b", {}, "devices"), title, notice),
      dead, table, foot));
    const rows = [];
    return {
      update(frame) {
        if (!frame.rows) return;
        setText(title, frame.title);
        setText(notice, frame.notice);
        notice.hidden = !frame.notice;
        setText(dead, frame.dead.join("\n"));
        dead.hidden = !frame.dead.length;
        setText(foot, frame.shared.join("\n"));
        const there = (key) => frame.rows.some((one) => one[key]);
        for (const key of ["queued", "cpu", "memory", "gpu"])
          table.classList.toggle(`dd-no-${key}`, !there(key));
        const colours = Object.fromEntries(frame.rows.map((one) => [one.rank, one.colour]));
        while (rows.length > frame.rows.length) rows.pop().row.remove();
        frame.rows.forEach((one, i) => {
          if (!rows[i]) {
            rows[i] = deviceRow();
            body.append(rows[i].row);
          }
          rows[i].update(one, colours);
        });
      },
    };
  }),
};
