// The "CF Timeline" page: TensorBoard calls render() inside the tab's frame.

import {Row} from './row.js';
import {element, followTheme} from './page.js';
import {legend} from './colours.js';
import {ask} from './server.js';
import {drawRows} from './rows.js';
import {Tip} from './tip.js';
import {Toolbar} from './toolbar.js';

const REFRESH = 30_000; // milliseconds
const FEW = 12; // runs

export async function render() {
  document.documentElement.lang = 'en';
  document.title = 'CF Timeline';
  document.head.append(element('link', {rel: 'stylesheet', href: './style.css'}));
  new Dashboard().start();
}

class Dashboard {
  constructor() {
    this.rows = new Map(); // by run, in the server's order
    this.view = {axis: 'step', quality: null, span: null};
    this.toolbar = new Toolbar({
      changed: () => this.arrange(),
      axis: (axis) => this.setAxis(axis),
      quality: (tag) => this.reload({quality: tag}),
      whole: () => this.reload({span: null}),
      refresh: () => this.refresh(),
    });
    this.legend = element('div', {className: 'legend'});
    this.note = element('p', {className: 'note', role: 'status'}, 'Loading runs ...');
    this.list = element('main', {className: 'rows'});
    document.body.append(this.toolbar.element, this.legend, this.note, this.list);
    // A row asks for its data when it is first seen: hundreds of runs cost what a screen shows. Of
    // a few all are asked for, so that a dense one's quality is drawn beside the others'.
    this.seen = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        const row = this.rows.get(entry.target.dataset.run);
        if (row) row.setVisible(entry.isIntersecting || this.rows.size <= FEW);
      }
    }, {rootMargin: '200px'});
    new ResizeObserver(() => this.draw()).observe(this.list);
  }

  async start() {
    followTheme(() => this.draw());
    await this.refresh();
    setInterval(() => {
      if (document.visibilityState === 'visible') this.refresh();
    }, REFRESH);
  }

  async refresh() {
    let runs;
    try {
      ({runs} = await ask('runs'));
    } catch (error) {
      this.note.textContent = `The runs could not be read: ${error.message}`;
      return;
    }
    const known = new Map();
    for (const {name} of runs) {
      known.set(name, this.rows.get(name) ?? this.newRow(name));
    }
    for (const [name, row] of this.rows) {
      if (!known.has(name)) row.element.remove();
    }
    this.rows = known;
    this.toolbar.setRuns(runs);
    this.view.quality = this.toolbar.quality;
    this.arrange();
    for (const row of this.rows.values()) row.outdate();
  }

  newRow(name) {
    const row = new Row(name, this.view, {
      ask: (parameters) => ask('timeline', parameters),
      loaded: () => this.draw(),
      pointed: (x) => this.point(x),
      zoomed: (from, to) => this.reload({span: [from, to]}),
      whole: () => this.reload({span: null}),
    });
    this.seen.observe(row.element);
    return row;
  }

  // Which rows are shown, and how they lie.
  arrange() {
    const chosen = this.toolbar.chosen();
    const shown = [...this.rows].filter(([name]) => chosen.has(name)).map(([, row]) => row);
    this.list.classList.toggle('beside', this.toolbar.beside);
    this.list.replaceChildren(...shown.map((row) => row.element));
    if (!shown.some((row) => row.plot.matches(':hover'))) Tip.hide(); // its row may be gone
    if (!this.rows.size) this.note.textContent = 'No run has recorded a CF yet.';
    else this.note.textContent = shown.length ? '' : 'No run matches.';
    this.draw();
  }

  setAxis(axis) {
    this.view.axis = axis;
    this.reload({span: null});
  }

  reload(change) {
    Object.assign(this.view, change);
    this.toolbar.setZoomed(this.view.span !== null);
    for (const row of this.rows.values()) row.outdate();
    this.draw();
  }

  draw() {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => {
      legend(this.legend);
      drawRows([...this.rows.values()], this.view);
    });
  }

  // The same x in every row, to compare runs.
  point(x) {
    for (const row of this.rows.values()) row.pointer.cross(x);
  }
}
