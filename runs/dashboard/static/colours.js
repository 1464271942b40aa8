// Colour by CF, on a log scale; dense is grey.

import {element, isDark} from './page.js';

const LIGHT = ['#bfe6dd', '#4fb3bf', '#3b6fb6', '#7a3b9a', '#3d0f5c'];
const DARK = ['#31507f', '#2f8fc4', '#35c0a5', '#a6d84f', '#fbe58a'];
const DENSE = {light: '#cdd1d6', dark: '#565b63'};

export function colour(cf, most) {
  if (cf === null) return 'transparent';
  if (cf <= 1) return isDark() ? DENSE.dark : DENSE.light;
  const stops = isDark() ? DARK : LIGHT;
  const at = Math.min(1, Math.log(cf) / Math.log(most)) * (stops.length - 1);
  const low = Math.min(Math.floor(at), stops.length - 2);
  return mix(stops[low], stops[low + 1], at - low);
}

function mix(a, b, share) {
  const part = (hex, i) => parseInt(hex.slice(1 + 2 * i, 3 + 2 * i), 16);
  const mixed = [0, 1, 2].map((i) => Math.round(part(a, i) * (1 - share) + part(b, i) * share));
  return `rgb(${mixed.join(' ')})`;
}

// Dense, then the scale with its powers of ten.
export function legend(into, most) {
  const dense = element('span', {className: 'swatch'});
  dense.style.background = colour(1, most);
  const scale = element('span', {className: 'scale'});
  const steps = Array.from({length: 25}, (_, i) => colour(1.0001 * most ** (i / 24), most));
  scale.style.background = `linear-gradient(to right, ${steps.join(', ')})`;
  for (let cf = 10; cf <= most; cf *= 10) {
    const tick = element('span', {className: 'tick'}, String(cf));
    tick.style.left = `${(100 * Math.log(cf)) / Math.log(most)}%`;
    scale.append(tick);
  }
  into.replaceChildren('dense', dense, 'CF', scale, marks());
}

function marks() {
  return element(
    'span', {className: 'hint'},
    '▼ switch  ▽ judged, and stayed   |   drag to zoom, double-click for the whole run',
  );
}
