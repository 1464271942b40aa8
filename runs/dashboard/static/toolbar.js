// What to show: which runs, over what, how they lie, and which quality is drawn under them.

import {element} from './page.js';

export class Toolbar {
  constructor(on) {
    this.on = on;
    this.hidden = new Set();
    this.filter = element('input', {
      type: 'search', placeholder: 'filter runs (regex)', id: 'filter',
      'aria-label': 'filter runs by a regular expression',
      oninput: () => on.changed(),
    });
    this.runs = element('div', {className: 'choices'});
    this.count = element('summary', {}, 'Runs');
    this.axis = choice('axis', 'x axis', {step: 'steps', second: 'seconds'}, on.axis);
    this.lie = choice('lie', 'runs', {rows: 'one below the other', beside: 'side by side'},
      () => on.changed());
    this.qualities = choice('quality', 'quality', {}, on.quality);
    this.zoom = element('button', {type: 'button', id: 'whole', hidden: true, onclick: on.whole},
      'whole run');
    this.element = element(
      'header', {className: 'toolbar'},
      element('h1', {}, 'CF Timeline'),
      element('details', {}, this.count, this.runs), this.filter,
      this.axis.label, this.lie.label, this.qualities.label, this.zoom,
      element('button', {type: 'button', id: 'refresh', onclick: on.refresh}, 'refresh'),
    );
  }

  get beside() {
    return this.lie.select.value === 'beside';
  }

  get quality() {
    return this.qualities.select.value || null;
  }

  setRuns(runs) {
    this.names = runs.map((run) => run.name);
    this.count.textContent = `Runs (${runs.length})`;
    this.runs.replaceChildren(...this.names.map((name) => this.box(name)));
    const tags = [...new Set(runs.flatMap((run) => run.qualities))];
    this.qualities.fill({'': tags.length ? 'of each run its evaluation, or loss' : 'none', ...pairs(tags)});
  }

  box(name) {
    const box = element('input', {
      type: 'checkbox', checked: !this.hidden.has(name),
      onchange: () => {
        if (box.checked) this.hidden.delete(name);
        else this.hidden.add(name);
        this.on.changed();
      },
    });
    return element('label', {}, box, name);
  }

  chosen() {
    const wanted = this.pattern();
    const names = (this.names ?? []).filter((name) => !this.hidden.has(name));
    return new Set(names.filter((name) => wanted.test(name)));
  }

  // As in TensorBoard's own filters; one that is still being typed, such as "(", filters nothing.
  pattern() {
    this.filter.classList.remove('wrong');
    try {
      return new RegExp(this.filter.value, 'i');
    } catch {
      this.filter.classList.add('wrong');
      return /(?:)/;
    }
  }

  setZoomed(zoomed) {
    this.zoom.hidden = !zoomed;
  }
}

function pairs(tags) {
  return Object.fromEntries(tags.map((tag) => [tag, tag]));
}

function choice(id, title, options, changed) {
  const select = element('select', {id, onchange: () => changed(select.value || null)});
  const fill = (wanted) => {
    const before = select.value;
    select.replaceChildren(
      ...Object.entries(wanted).map(([value, text]) => element('option', {value}, text)),
    );
    if (before in wanted) select.value = before;
  };
  fill(options);
  return {select, fill, label: element('label', {}, `${title} `, select)};
}
