// Rows below one another: what they share.

const GUTTER = {plain: 76, layers: 170}; // pixels for names at the left

// All share one scale of x and of CFs, and of quality where they show the same. view: {axis, span}.
export function drawRows(rows, view) {
  const known = rows.filter((row) => row.data);
  const shown = rows.filter((row) => row.element.isConnected);
  const ends = shown.map((row) => row.end(view.axis));
  const scale = {
    axis: view.axis,
    domain: view.span ?? [0, Math.max(1, ...ends)],
    left: shown.some((row) => row.data?.layers) ? GUTTER.layers : GUTTER.plain,
    top: Math.max(10, ...known.map((row) => row.data.most)), // of all, also of those hidden
  };
  const ranges = new Map(); // by tag
  for (const row of shown) {
    const tag = row.data?.quality?.tag;
    const values = row.qualities(scale.domain);
    const [low, high] = ranges.get(tag) ?? [Infinity, -Infinity];
    ranges.set(tag, [Math.min(low, ...values), Math.max(high, ...values)]);
  }
  const dense = known.find((row) => row.data.dense) ?? null;
  for (const row of shown) row.draw(scale, ranges.get(row.data?.quality?.tag), dense);
}
