// Below the lanes of the timeline: what is known of one event, and the sums.

const SITE_HEADS = ["collective", "called at", "times", "waited in all", "last to arrive"];

// What is known of one event, below the lanes.
function detailsView(close) {
  const body = element("div", { class: "dt-details", role: "region", "aria-live": "polite",
    "aria-label": "details of the chosen event", hidden: true });
  return {
    body,
    hide() {
      body.hidden = true;
      body.replaceChildren();
    },
    show(found) {
      const most = Math.max(1, ...found.members.map((one) => one.share));
      const facts = found.facts.flatMap(([name, value]) => [
        element("dt", {}, name), element("dd", {}, value)]);
      const members = found.members.map((one) => element("tr", {},
        element("td", {}, chip(one.rank, one.colour)),
        element("td", {}, one.came, one.last ? element("b", {}, " ◀ last") : "",
          ["done", "waiting"].includes(one.state) ? "" : ` ${one.state}`),
        element("td", {}, element("span", { class: "dt-bar",
          style: `width: ${Math.round((90 * one.share) / most)}px` }), ` ${one.waited}`)));
      const table = members.length ? element("table", {},
        element("thead", {}, element("tr", {},
          ...["worker", "came", "waited"].map((head) => element("th", {}, head)))),
        element("tbody", {}, ...members)) : null;
      body.replaceChildren(
        element("div", { class: "dt-top" }, chip(found.rank, found.colour),
          element("b", {}, found.name), element("span", { class: "dt-muted" },
            [found.kind, found.others].filter(Boolean).join(" · ")),
          element("button", { onclick: close, "aria-label": "close details", title: "close (Esc)" },
            "×")),
        element("div", { class: "dt-facts" }, element("dl", {}, ...facts), table ?? ""));
      body.hidden = false;
    },
  };
}

function summaryView() {
  const sites = element("tbody"), workers = element("tbody");
  const none = element("div", { class: "dt-muted" }, "no collective yet");
  const more = element("div", { class: "dt-muted" });
  const table = element("table", { class: "dt-sites" },
    element("thead", {}, element("tr", {},
      ...SITE_HEADS.map((head) => element("th", { scope: "col" }, head)))), sites);
  const body = element("div", { class: "dt-summary" },
    element("section", {}, element("h4", {}, "waiting by place in the program"), table, none, more),
    element("section", {}, element("h4", {}, "time of the workers"),
      element("table", { class: "dt-workers" }, workers)));
  let before = "";
  const siteRow = (one, most) => element("tr", {},
    element("td", {}, one.name),
    element("td", { class: "dt-site" }, one.site),
    element("td", { class: "dt-number" }, String(one.count)),
    element("td", {}, element("span", { class: "dt-bar",
      style: `width: ${Math.round((64 * one.ns) / most)}px` }), ` ${one.waited}`),
    element("td", {}, ...(one.rank == null ? [] :
      [chip(one.rank, one.colour), ` ${one.times} of ${one.count} times`])));
  const workerRow = (one) => element("tr", {},
    element("td", {}, chip(one.rank, one.colour)),
    element("td", {}, element("span", { class: "dt-shares", "aria-hidden": "true" },
      element("i", { style: `width: ${one.busy}%; background: ${one.colour}99` }),
      element("i", { class: "dt-waiting", style: `width: ${one.waiting}%` }))),
    element("td", {}, `busy ${one.busy} %, waiting ${one.waiting} %, idle ${one.idle} %` +
      (one.failed ? `, ${one.failed} failed` : "")));
  return {
    body,
    update(found) {
      const now = JSON.stringify(found);
      if (now === before) return;
      before = now;
      const most = Math.max(1, ...found.sites.map((one) => one.ns));
      sites.replaceChildren(...found.sites.map((one) => siteRow(one, most)));
      workers.replaceChildren(...found.workers.map(workerRow));
      table.hidden = !found.sites.length;
      none.hidden = !table.hidden;
      setText(more, found.more ? `and ${found.more} more` : "");
      body.hidden = !found.workers.length;
    },
  };
}
