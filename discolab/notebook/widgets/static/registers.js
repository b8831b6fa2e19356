// The live registers of a session. The kernel sorts and filters; it sends the rows that are in sight
// and some around them. Rows are drawn in place, so focus, selection and scrolling stay.

const HEIGHT = 24; // px of a row
const HEAD = 27; // px of the headings, which stay on top
const MOST_SHOWN = 12; // rows
const FEWEST_SHOWN = 4;
const AROUND = 30; // rows asked for beyond those in sight

// title, class, what the kernel sorts by, which cell of a row; age is worked out here
const COLUMNS = [
  ["reg.", "dlr-id", "id", 0],
  ["name", "dlr-name", "name", 1],
  ["type", "dlr-type", "type", 2],
  ["layout", "dlr-layout", null, 3],
  ["bytes", "dlr-bytes dlr-right", null, 4],
  ["total", "dlr-total dlr-right", "bytes", 5],
  ["age", "dlr-age dlr-right", "age", null],
  ["made by", "dlr-site", "site", 6],
  ["held by", "dlr-held", null, 7],
  ["state", "dlr-state", null, 8],
];
const TYPE = 2;
const STATE = 8;

function ageWords(seconds) {
  for (const [size, unit] of [[86400, "d"], [3600, "h"], [60, "min"]])
    if (seconds >= size) return `${Math.floor(seconds / size)} ${unit}`;
  return `${Math.max(0, Math.floor(seconds))} s`;
}

function startRegisters(root, send) {
  const me = Math.random().toString(36).slice(2);
  let frame = { count: 0, windows: {}, groups: [] };
  let rows = new Map(); // place -> row of the window
  let asked = [0, 0];
  let selected = { place: -1, id: null, made: null };
  let opened = null; // row whose view is below
  let asking = null; // row that is asked about
  let skew = Infinity; // seconds that this clock is ahead of the kernel's
  let filtering = 0; // a timer: words that are being typed
  let typed = null; // what the kernel has been sent and has not followed yet

  // -- what stands on the page, once
  const title = element("span", { class: "dlr-title" });
  const totals = element("span", { class: "dlr-totals" });
  const filter = element("input", {
    type: "search", placeholder: "filter", "aria-label": "show only registers with these words",
  });
  const leaks = element("input", { type: "checkbox" });
  const bar = element("div", { class: "dlr-bar" }, title, totals, filter,
    element("label", { title: "registers that no name of the notebook leads to, or of which a line makes more with each cell" }, leaks, "leaks"));
  const groups = element("div", { class: "dlr-groups", hidden: true });
  const heads = COLUMNS.map(([text, css, by]) => {
    const made = element("span", { class: css, role: "columnheader" });
    if (!by) made.append(text);
    else made.append(element("button", { type: "button", title: `sort by ${text}`, onclick: () => sortBy(by) }, text));
    return made;
  });
  const head = element("div", { class: "dlr-head", role: "row" }, ...heads, element("span"));
  const space = element("div", { class: "dlr-space", role: "presentation" });
  const none = element("div", { class: "dlr-none", hidden: true });
  const body = element("div", { class: "dlr-body", tabindex: "0", role: "grid",
    "aria-label": "registers: arrows choose, Enter opens, Delete frees" }, head, space, none);
  const table = element("div", { class: "dlr-table" }, body);
  const confirm = element("div", { class: "dlr-ask", role: "alertdialog", hidden: true });
  const question = element("span", { class: "dlr-question" });
  const yes = element("button", { type: "button", onclick: () => free() }, "Free");
  const no = element("button", { type: "button", onclick: () => keep() }, "Keep");
  confirm.append(question, element("span", { class: "dlr-buttons" }, yes, no));
  space.append(confirm);
  const view = element("div", { class: "dlr-view", hidden: true });
  const viewTitle = element("strong");
  const facts = element("dl");
  const picture = element("div", { class: "dlr-picture", "aria-live": "polite" });
  view.append(
    element("div", { class: "dlr-view-head" }, viewTitle,
      element("button", { type: "button", onclick: () => open(opened) }, "Draw again"),
      element("button", { type: "button", onclick: () => closeView() }, "Close")),
    facts, picture);
  const outer = element("div", { class: "dlr" }, bar, groups, table, view);
  root.append(outer);

  // -- rows: a fixed set of elements, moved and filled as the table scrolls
  const pool = [];
  function lineAt(place) {
    while (pool.length <= MOST_SHOWN + 2) {
      const cells = COLUMNS.map(([, css]) => element("span", { class: css, role: "gridcell" }));
      const button = element("button", { type: "button", tabindex: "-1" }, "×");
      const line = element("div", { class: "dlr-row", role: "row", hidden: true }, ...cells, button);
      const made = { line, cells, button, place: -1 };
      line.addEventListener("click", (event) => {
        const row = rows.get(made.place);
        if (!row) return;
        select(made.place);
        if (event.target === button) ask(row);
        else open(row);
      });
      pool.push(made);
      space.append(line);
    }
    return pool[place % pool.length];
  }

  const sight = () => Math.max(0, body.clientHeight - HEAD); // px that rows have

  function inSight() {
    const first = Math.max(0, Math.floor(body.scrollTop / HEIGHT));
    return [first, Math.min(frame.count, first + Math.ceil(sight() / HEIGHT) + 1)];
  }

  function drawRows() {
    const [first, end] = inSight();
    lineAt(0);
    const used = new Set();
    for (let place = first; place < end; place++) {
      const item = lineAt(place);
      used.add(item);
      fill(item, place, rows.get(place));
    }
    for (const item of pool)
      if (!used.has(item)) {
        item.place = -1;
        item.line.hidden = true;
      }
    const active = pool.find((item) => item.place === selected.place && selected.place >= 0);
    if (active) body.setAttribute("aria-activedescendant", active.line.id);
    else body.removeAttribute("aria-activedescendant");
  }

  function fill(item, place, row) {
    if (item.place !== place) {
      item.place = place;
      item.line.style.top = `${place * HEIGHT}px`;
      item.line.id = `${me}-${place}`;
      item.line.setAttribute("aria-rowindex", place + 2);
    }
    item.line.hidden = false;
    item.line.setAttribute("aria-selected", String(place === selected.place));
    item.button.hidden = !row;
    if (!row) {
      item.cells.forEach((cell, i) => setText(cell, i ? "" : "…"));
      return;
    }
    const [id, made, words, problem, named] = row;
    COLUMNS.forEach(([, css, , at], i) => {
      const cell = item.cells[i];
      const text = at === null ? ageWords(now() - made) : words[at];
      setText(cell, text);
      const hint = at === STATE && problem ? `${text}: ${problem}` : text;
      if (cell.title !== hint) cell.title = hint;
      let extra = "";
      if (at === STATE) extra = problem ? " dlr-bad" : text === "ok" || text.startsWith("restored") ? " dlr-muted" : " dlr-wait";
      else if (at === TYPE && problem) extra = " dlr-failed"; // seen where there is no room for states
      else if (at === 7 && !named) extra = " dlr-lost";
      if (cell.className !== css + extra) cell.className = css + extra;
    });
    const label = `free r${id}`;
    if (item.button.title !== label) {
      item.button.title = label;
      item.button.setAttribute("aria-label", label);
    }
  }

  const now = () => Date.now() / 1000 - (Number.isFinite(skew) ? skew : 0);

  function askForRows() {
    const [first, end] = inSight();
    const [start, count] = asked;
    const near = Math.floor(AROUND / 2);
    const enough = start <= Math.max(0, first - near) && start + count >= Math.min(frame.count, end + near);
    if (enough && count) return;
    asked = [Math.max(0, first - AROUND), MOST_SHOWN + 2 * AROUND];
    send("window", { view: me, start: asked[0], count: asked[1] });
  }

  // -- what a person does
  function sortBy(by) {
    send("sort", { by, backwards: frame.sort === by && !frame.backwards });
  }

  function select(place) {
    if (place < 0 || place >= frame.count) return;
    const row = rows.get(place);
    selected = { place, id: row ? row[0] : null, made: row ? row[1] : null };
    const top = place * HEIGHT;
    if (top < body.scrollTop) body.scrollTop = top;
    else if (top + HEIGHT > body.scrollTop + sight()) body.scrollTop = top + HEIGHT - sight();
    drawRows();
    askForRows();
  }

  function open(row) {
    if (!row) return;
    const fresh = !opened || opened[0] !== row[0] || opened[1] !== row[1];
    opened = row;
    showFacts();
    if (fresh) {
      picture.replaceChildren(element("span", { class: "dlr-muted" }, `drawing r${row[0]} …`));
    }
    view.hidden = false;
    send("open", { id: row[0], made: row[1] });
  }

  function showFacts() {
    const [id, made, words, problem, , kind] = opened;
    setText(viewTitle, `r${id}${words[1] !== "-" ? " · " + words[1] : ""}`);
    const told = [
      ["type", problem ? "" : kind === "DRef" ? words[2] : `${kind} ${words[2]}`], ["layout", words[3]],
      ["bytes", words[4]], ["made by", words[6]], ["held by", words[7] || words[1]],
      ["state", problem ? `${words[8]}: ${problem}` : words[8]],
    ].filter(([, text]) => text);
    const key = JSON.stringify(told);
    if (facts.dataset.key === key) return;
    facts.dataset.key = key;
    facts.replaceChildren(...told.flatMap(([name, text]) => [element("dt", {}, name), element("dd", {}, text)]));
  }

  function closeView() {
    opened = null;
    view.hidden = true;
    body.focus();
  }

  function ask(row) {
    asking = row;
    const [id, , words] = row;
    const name = words[1] !== "-" ? `the notebook's ${words[1]} will be unusable` : "what holds it will be unusable";
    setText(question, `Free r${id} on all workers? Its value is gone then; ${name}.`);
    confirm.style.top = `${selected.place * HEIGHT}px`;
    confirm.hidden = false;
    no.focus({ preventScroll: true });
    // near the end of the table it goes up by what would stick out
    const over = confirm.offsetTop + confirm.offsetHeight - (body.scrollTop + sight());
    if (over > 0) confirm.style.top = `${Math.max(0, selected.place * HEIGHT - over)}px`;
  }

  function keep() {
    asking = null;
    confirm.hidden = true;
    body.focus({ preventScroll: true });
  }

  function free() {
    send("free", { id: asking[0], made: asking[1] });
    keep();
  }

  filter.addEventListener("input", () => {
    clearTimeout(filtering);
    typed = filter.value;
    filtering = setTimeout(() => {
      body.scrollTop = 0;
      send("filter", { text: typed });
    }, 120);
  });
  leaks.addEventListener("change", () => send("leaks", { on: leaks.checked }));
  body.addEventListener("scroll", () => {
    drawRows();
    askForRows();
  });
  confirm.addEventListener("keydown", (event) => {
    event.stopPropagation(); // keys of the notebook
    if (event.key === "Escape") keep();
  });
  filter.addEventListener("keydown", (event) => event.stopPropagation());
  body.addEventListener("keydown", (event) => {
    const page = Math.max(1, Math.floor(sight() / HEIGHT) - 1);
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page };
    const row = rows.get(selected.place);
    if (event.target !== body) return;
    if (event.key in moves) {
      const to = selected.place < 0 ? 0 : selected.place + moves[event.key];
      select(Math.min(Math.max(to, 0), frame.count - 1));
    } else if (event.key === "Home") select(0);
    else if (event.key === "End") select(frame.count - 1);
    else if (event.key === "Enter" && row) open(row);
    else if ((event.key === "Delete" || event.key === "Backspace") && row) ask(row);
    else if (event.key === "Escape" && !view.hidden) closeView();
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  const clock = setInterval(() => document.hidden || drawRows(), 1000);

  // -- what the kernel says
  function update(latest) {
    if (latest.count === undefined) return;
    frame = latest;
    skew = Math.min(skew, Date.now() / 1000 - frame.at);
    setText(title, frame.title);
    const some = frame.count !== frame.all && !frame.leaks ? ` · ${frame.count.toLocaleString("en")} match` : "";
    setText(totals, frame.totals + some);
    if (typed === frame.text) typed = null;
    if (typed === null && filter.value !== frame.text) filter.value = frame.text;
    leaks.checked = frame.leaks;
    COLUMNS.forEach(([text, , by], i) => {
      if (!by) return;
      const on = frame.sort === by;
      const down = (by === "bytes" || by === "age") !== frame.backwards;
      heads[i].setAttribute("aria-sort", on ? (down ? "descending" : "ascending") : "none");
      setText(heads[i].firstChild, on ? `${text} ${down ? "▾" : "▴"}` : text);
    });
    showGroups();
    body.setAttribute("aria-rowcount", frame.count + 1);
    // by all that there are, so that a filter moves nothing
    const height = Math.min(Math.max(frame.all, FEWEST_SHOWN), MOST_SHOWN) * HEIGHT;
    body.style.height = `${height + HEAD}px`;
    space.style.height = `${frame.count * HEIGHT}px`;
    none.hidden = frame.count > 0;
    setText(none, frame.leaks ? "nothing leaks: names of the notebook lead to all registers"
      : frame.all ? "no register has these words" : "no live registers");
    const [start, found] = frame.windows[me] ?? frame.windows[""] ?? [0, []];
    rows = new Map(found.map((row, i) => [start + i, row]));
    follow();
    drawRows();
    askForRows();
  }

  function follow() {
    const same = (row, id, made) => row && row[0] === id && row[1] === made;
    if (selected.id !== null && !same(rows.get(selected.place), selected.id, selected.made)) {
      for (const [place, row] of rows)
        if (same(row, selected.id, selected.made)) selected.place = place;
    }
    const row = rows.get(selected.place);
    if (row && selected.id === null) selected = { place: selected.place, id: row[0], made: row[1] };
    if (selected.place >= frame.count) selected = { place: frame.count - 1, id: null, made: null };
    if (opened)
      for (const one of rows.values())
        if (same(one, opened[0], opened[1])) {
          opened = one;
          showFacts();
        }
  }

  function showGroups() {
    groups.hidden = !frame.leaks || !frame.groups.length;
    const key = JSON.stringify(frame.groups);
    if (groups.dataset.key === key) return;
    groups.dataset.key = key;
    groups.replaceChildren(...frame.groups.map(([site, count, growth, why]) => element("div", {},
      `${count} made by ${site}: ${why}`, element("span", { class: "dlr-muted" }, growth))));
  }

  function message(content) {
    if (content.type === "opened" && opened && content.id === opened[0]) {
      picture.innerHTML = content.html; // what views.render_html has made: all text is escaped
    } else if (content.type === "freed" && opened && content.id === opened[0]) {
      picture.replaceChildren(element("span", { class: "dlr-muted" }, `r${content.id} was freed`));
    }
  }

  return {
    update,
    message,
    stop() {
      clearInterval(clock);
      clearTimeout(filtering);
    },
  };
}

export default { render: disco(startRegisters) };
