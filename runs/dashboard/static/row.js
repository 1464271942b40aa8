// One run: its CFs, heat map of layers, curve of quality, and what the pointer is on.

import {cfName, element, last, short} from './page.js';
import {
  BAND, drawAxis, drawBand, drawLayers, drawQuality, LABEL, labelled, LAYER_HEIGHT,
} from './draw.js';
import {Pointer} from './pointer.js';
import {Tip, tellStep} from './tip.js';

export class Row {
  // on: ask(parameters) for the data; loaded(), pointed(x), zoomed(from, to), whole().
  constructor(name, view, on) {
    this.name = name;
    this.view = view;
    this.on = on;
    this.data = null;
    this.whole = null; // what an unzoomed answer said of steps and seconds
    this.stale = true;
    this.visible = false;
    this.facts = element('span', {className: 'facts'}, 'loading ...');
    this.verdict = element('p', {className: 'verdict'});
    this.band = element('canvas', {className: 'band', role: 'img', 'aria-label': `CFs of ${name}`});
    this.layers = element('canvas', {className: 'layers', hidden: true});
    this.quality = element('canvas', {className: 'quality', hidden: true});
    this.axis = element('canvas', {className: 'axis'});
    this.plot = element('div', {className: 'plot'},
      this.band, this.layers, this.quality, this.axis);
    this.element = element('section', {className: 'run'},
      element('h2', {}, element('span', {className: 'name'}, name), this.facts),
      this.verdict, this.plot);
    this.element.dataset.run = name;
    this.pointer = new Pointer(this.plot, {
      pointed: (x, event) => {
        on.pointed(x);
        if (x === null || !this.data) Tip.hide();
        else Tip.show(tellStep(this.data, view.axis, x, this.layerAt(event), name), event);
      },
      zoomed: on.zoomed,
      whole: on.whole,
    });
  }

  // -- data --------------------------------------------------------------------------------------

  setVisible(visible) {
    this.visible = visible;
    this.load();
  }

  outdate() {
    this.stale = true;
    this.load();
  }

  async load() {
    if (!this.stale || !this.visible) return;
    this.stale = false;
    const asked = (this.asked = {});
    const {span} = this.view;
    const [from, to] = span ? [this.stepAt(span[0], 0), this.stepAt(span[1], 1)] : [null, null];
    let data;
    try {
      data = await this.on.ask({run: this.name, quality: this.view.quality, from, to});
    } catch (error) {
      this.facts.textContent = `could not be read: ${error.message}`;
      return;
    }
    if (this.asked !== asked) return; // a newer question is under way
    this.data = data;
    if (from === null) this.whole = data.numbers;
    this.verdict.textContent = data.headline;
    this.element.dataset.loaded = 'yes';
    this.on.loaded();
  }

  // Steps are what the server knows: seconds are looked up in the whole run, of which not every step
  // is there. after: 1 for the next one that is, so that what is shown reaches as far as x.
  stepAt(x, after) {
    if (this.view.axis === 'step' || !this.whole) return Math.round(x);
    const {step, second} = this.whole;
    return step[Math.min(Math.max(0, last(second, x)) + after, step.length - 1)];
  }

  end(axis) {
    if (!this.data) return 0;
    return axis === 'step' ? this.data.last + 1 : this.data.seconds;
  }

  // Values of the quality in the domain.
  qualities([low, high]) {
    const {quality} = this.data ?? {};
    const known = (quality?.values ?? []).map((value, i) => [quality[this.view.axis][i], value])
      .filter(([, value]) => value !== null);
    const inside = known.filter(([x]) => x >= low && x <= high);
    return (inside.length ? inside : known).map(([, value]) => value);
  }

  // -- drawing -----------------------------------------------------------------------------------

  // range: of the quality's axis. dense: the row of a dense run; null: there is none.
  draw(scale, range, dense) {
    const {data} = this;
    Object.assign(this.pointer, {domain: scale.domain, left: scale.left});
    this.plot.dataset.left = scale.left;
    if (!data) return;
    this.layers.hidden = !data.layers;
    this.quality.hidden = !data.quality;
    this.facts.textContent = facts(data, scale).join(' · ');
    const names = labelled(data.band.cf).length;
    this.band.style.height = `${Math.max(BAND, LABEL * (names + 1))}px`;
    drawBand(this.band, data, scale);
    if (data.layers) {
      const height = Math.max(3, Math.min(LAYER_HEIGHT, 240 / data.layers.names.length));
      this.layers.style.height = `${height * data.layers.names.length}px`;
      drawLayers(this.layers, data.layers, scale);
    }
    const other = dense?.data.quality;
    const beside = dense !== this && other?.tag === data.quality?.tag ? other : null;
    if (data.quality) drawQuality(this.quality, data.quality, scale, range, beside);
    drawAxis(this.axis, scale);
  }

  layerAt(event) {
    if (!this.data?.layers || event.target !== this.layers) return null;
    const box = this.layers.getBoundingClientRect();
    const rows = this.data.layers.names.length;
    const row = Math.floor(((event.clientY - box.top) / box.height) * rows);
    return row >= 0 && row < rows ? row : null;
  }
}

// What is to be known at a glance, of the part of the run that is shown.
function facts(data, {axis, domain}) {
  const {numbers, quality, totals, band} = data;
  const piece = Math.max(0, last(band[axis], domain[1]));
  const end = last(numbers[axis], domain[1]);
  const before = last(numbers[axis], domain[0]);
  const told = [`${cfName(band.cf[piece], data.rungs)} at step ${numbers.step[end] ?? data.to}`];
  if (end > Math.max(0, before)) {
    // From the run's first step on the totals are those of its end.
    const part = (values) => values[end] - (before < 0 || numbers.step[before] <= data.first
      ? 0 : values[before]);
    const moves = totals.moves[end] - totals.moves[Math.max(0, before)];
    told.push(`${moves} switch${moves === 1 ? '' : 'es'}`);
    const [sent, dense] = [part(totals.sent), part(totals.dense)];
    if (dense > 0) told.push(`${saved(sent / dense)} (${short(sent / 1e6)} MB sent)`);
    const first = Math.max(0, before);
    const seconds = numbers.second[end] - numbers.second[first];
    const steps = numbers.step[end] - numbers.step[first];
    if (seconds > 0) told.push(`${Number((steps / seconds).toPrecision(3))} steps/s`);
  }
  const shown = quality ? last(quality[axis], domain[1]) : -1;
  if (shown >= 0) told.push(`${quality.tag} ${short(quality.values[shown])}`);
  return told;
}

function saved(share) {
  const percent = 100 * (1 - share);
  if (Math.abs(percent) < 0.5) return 'as many bytes as dense';
  const text = Math.abs(percent) >= 99 ? Math.abs(percent).toFixed(1) : Math.abs(percent).toFixed(0);
  return `${text}% ${percent > 0 ? 'fewer' : 'more'} bytes than dense`;
}
