// Names down, workers across: variables, and what an expression gives; equal neighbours are one.

const MOST_COLUMNS = 8; // workers with a column each; of more the values are listed

function valueCell(cell, ranks, colours, all) {
  const whole = cell.ranks.length === ranks.length;
  const words = element("span", { class: `dls-words dls-role-${cell.role}` }, cell.words);
  const inner = element("div", { class: "dls-in" },
    whole && ranks.length > 1 ? element("span", { class: "dls-all-have" }, ranks.length === all ? "all" : "each")
      : chips(cell.ranks, colours, all),
    cell.image ? element("img", { class: "dls-heat", src: cell.image, alt: cell.alt, title: cell.alt }) : null,
    words, cell.note ? element("span", { class: "dls-note" }, cell.note) : null);
  return element("td", {
    class: `dls-cell${whole ? " dls-whole" : cell.ranks.length > 1 ? " dls-several" : ""}`, style: `--rank: ${colours[cell.ranks[0]]}`,
    colspan: cell.ranks.length > 1 && ranks.length <= MOST_COLUMNS ? cell.ranks.length : null, title: cell.words,
  }, inner);
}

function valueRow(row, ranks, colours, all) {
  const cells = [];
  let next = 0; // in `ranks`: where there is nothing to tell the cell is empty
  for (const cell of row.cells) {
    if (ranks.length <= MOST_COLUMNS) for (; next < ranks.indexOf(cell.ranks[0]); next++) cells.push(element("td", { class: "dls-none" }));
    cells.push(valueCell(cell, ranks, colours, all));
    next += cell.ranks.length;
  }
  const hints = [row.differs && "not the same on all workers", row.changed && "changed since the last stop"];
  return element("tr", { class: (row.differs ? "dls-differs" : "") + (row.changed ? " dls-changed" : "") },
    element("th", { scope: "row", title: hints.filter(Boolean).join("; ") || null },
      element("div", { class: "dls-label-in" },
        element("span", { class: "dls-mark dls-mark-differs", "aria-hidden": "true" }, row.differs ? "≠" : ""),
        element("span", { class: "dls-mark dls-mark-changed", "aria-hidden": "true" }, row.changed ? "●" : ""),
        element("span", {}, element("span", { class: "dls-name" }, row.name),
          row.about ? element("span", { class: "dls-about" }, row.about) : null))),
    ...cells);
}

function valueTable(rows, ranks, colours, all, title) {
  const heads = ranks.length > MOST_COLUMNS ? [] : ranks;
  const columns = element("colgroup", {}, element("col", { class: "dls-names" }), ...heads.map(() => element("col")));
  const head = title === null ? null : element("thead", {}, element("tr", {}, element("th", {}, title),
    ...heads.map((rank) => element("th", { scope: "col" }, chips([rank], colours, 0)))));
  return element("table", { class: `dls-values${heads.length ? "" : " dls-listed"}` }, columns, head,
    element("tbody", {}, ...rows.map((row) => valueRow(row, ranks, colours, all))));
}

function startValues() {
  const node = element("div", { class: "dls-variables" });
  const opened = new Set(); // titles of tables of which all is shown
  let shown = "";

  function table(one, colours, all) {
    const parts = [element("div", { class: "dls-scroll" },
      one.rows.length ? valueTable(one.rows, one.ranks, colours, all, one.title)
        : element("div", { class: "dls-muted dls-nothing" }, `no ${one.title} yet`))];
    if (one.rest.length) {
      const count = one.rest.length + one.more;
      const more = element("details", { open: opened.has(one.title) }, element("summary", {}, `${count} more`),
        element("div", { class: "dls-scroll" }, valueTable(one.rest, one.ranks, colours, all, null)));
      more.addEventListener("toggle", () => opened[more.open ? "add" : "delete"](one.title));
      parts.push(more);
    }
    return element("div", { class: "dls-table" }, ...parts);
  }

  return {
    node,
    update(tables, stale, colours) {
      node.hidden = !tables.length;
      node.classList.toggle("dls-stale", stale);
      const now = JSON.stringify([tables, colours]);
      if (now === shown) return;
      shown = now;
      const places = [...node.querySelectorAll(".dls-scroll")].map((box) => box.scrollLeft);
      node.replaceChildren(...tables.map((one) => table(one, colours, Object.keys(colours).length)));
      [...node.querySelectorAll(".dls-scroll")].forEach((box, i) => (box.scrollLeft = places[i] ?? 0));
    },
  };
}

function startResults() {
  const node = element("div", { class: "dls-results" });
  let shown = "";
  return {
    node,
    update(results, colours) {
      const now = JSON.stringify([results, colours]);
      if (now === shown) return;
      shown = now;
      node.hidden = !results.length;
      node.replaceChildren(...results.map(({ row, ranks, past }) => element("div", {
        class: `dls-scroll${past ? " dls-past" : ""}`, title: past ? "of an earlier stop" : null,
      }, valueTable([row], ranks, colours, Object.keys(colours).length, null))));
    },
  };
}
