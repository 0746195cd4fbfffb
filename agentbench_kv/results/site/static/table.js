// Sorts and searches the list of runs; the state is the address's fragment.
(() => {
  const table = document.getElementById("runs");
  const form = document.getElementById("filters");
  const headings = [...table.querySelectorAll("thead button")];
  const rows = [...table.querySelectorAll("tr[data-order]")].map((row) => {
    const next = row.nextElementSibling;
    const why = next && next.classList.contains("why") ? next : null;
    const text = `${row.textContent} ${why ? why.textContent : ""}`.toLowerCase();
    return { row, why, text, order: Number(row.dataset.order) };
  });
  let state = new URLSearchParams();

  function show() {
    const sort = state.get("sort") || "";
    const descending = sort.startsWith("-");
    const column = headings.findIndex((button) => button.dataset.key === sort.replace("-", ""));
    headings.forEach((button, index) => {
      button.closest("th").setAttribute("aria-sort", index !== column ? "none" : descending ? "descending" : "ascending");
    });
    const value = ({ row, order }) => (column < 0 ? order : row.cells[column].dataset.v);
    rows.sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      if (x === y) return a.order - b.order;
      if (x === "" || y === "") return x === "" ? 1 : -1;
      const numbers = !Number.isNaN(Number(x)) && !Number.isNaN(Number(y));
      return (descending ? -1 : 1) * (numbers ? x - y : x.localeCompare(y));
    });
    table.tBodies[0].append(...rows.flatMap(({ row, why }) => (why ? [row, why] : [row])));
    const words = (state.get("q") || "").toLowerCase().split(/\s+/).filter(Boolean);
    for (const { row, why, text } of rows) {
      row.hidden = !words.every((word) => text.includes(word));
      if (why) why.hidden = row.hidden;
    }
    document.getElementById("count").textContent = `${rows.filter(({ row }) => !row.hidden).length} of ${rows.length} runs`;
  }

  function set(key, value) {
    if (value) state.set(key, value); else state.delete(key);
    history.replaceState(null, "", `#${state}`);
    show();
  }

  function restore() {
    state = new URLSearchParams(location.hash.includes("=") ? location.hash.slice(1) : "");
    form.elements.q.value = state.get("q") || "";
    show();
  }

  for (const button of headings) {
    button.addEventListener("click", () => {
      const { key } = button.dataset;
      const big = button.closest("th").classList.contains("num") && key !== "place";
      const [first, second] = big ? [`-${key}`, key] : [key, `-${key}`];
      set("sort", state.get("sort") === first ? second : first);
    });
  }
  form.addEventListener("input", () => set("q", form.elements.q.value));
  form.addEventListener("submit", (event) => event.preventDefault());
  addEventListener("hashchange", restore);
  restore();
})();
