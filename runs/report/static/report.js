// A report's pictures: quality against time, and the dashboard's rows.

import {Chart} from './chart.js';
import {legend} from './colours.js';
import {followTheme} from './page.js';
import {Row} from './row.js';
import {drawRows} from './rows.js';

const DATA = JSON.parse(document.getElementById('data').textContent);
const CHART = DATA.chart && new Chart(document.getElementById('chart'), DATA.chart);
const VIEW = {axis: 'step', span: null};

function redraw() {
  const into = document.getElementById('legend');
  if (into) legend(into);
  drawRows(ROWS, VIEW);
}

function look(span) {
  VIEW.span = span;
  redraw();
}

const ROWS = DATA.rows.map((data) => new Row(data.run, VIEW, {
  ask: async () => data, // all of it is here: there is no server to ask for a part
  loaded: redraw,
  pointed: (x) => ROWS.forEach((row) => row.pointer.cross(x)),
  zoomed: (from, to) => look([from, to]),
  whole: () => look(null),
}));
document.getElementById('rows')?.append(...ROWS.map((row) => row.element));
ROWS.forEach((row) => row.setVisible(true));
document.getElementById('axis')?.addEventListener('change', (event) => {
  VIEW.axis = event.target.value;
  look(null);
});
new ResizeObserver(redraw).observe(document.querySelector('main'));
followTheme(() => {
  redraw();
  CHART?.draw();
});
