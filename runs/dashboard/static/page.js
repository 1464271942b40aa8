// Elements, light and dark, numbers for people.

export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes('-') || name === 'role') made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children);
  return made;
}

// TensorBoard marks its own page as dark; on its own this page follows the system.
export function followTheme(changed) {
  const system = matchMedia('(prefers-color-scheme: dark)');
  const host = hostBody();
  const apply = () => {
    const dark = host ? host.classList.contains('dark-mode') : system.matches;
    document.documentElement.classList.toggle('dark', dark);
    changed();
  };
  if (host) new MutationObserver(apply).observe(host, {attributeFilter: ['class']});
  else system.addEventListener('change', apply);
  apply();
}

function hostBody() {
  try {
    return window.parent === window ? null : window.parent.document.body;
  } catch {
    return null; // framed by a page of another origin
  }
}

export function isDark() {
  return document.documentElement.classList.contains('dark');
}

export function cssColour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// 12.3 k, 4.56 M: short, for people.
export function short(value) {
  if (value === null || value === undefined) return 'not known';
  const size = Math.abs(value);
  for (const [unit, name] of [[1e9, ' G'], [1e6, ' M'], [1e4, ' k']]) {
    if (size >= unit) return trim(value / (name === ' k' ? 1e3 : unit)) + name;
  }
  return trim(value);
}

// Index of the last of ascending values that is at most x; -1 if there is none.
export function last(values, x) {
  let low = 0;
  let high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= x) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

// rungs: names of compressors by CF.
export function cfName(cf, rungs = {}) {
  if (rungs[cf]) return `${rungs[cf]} (CF ${trim(cf)})`;
  return cf === 1 ? 'dense' : `CF ${trim(cf)}`;
}

function trim(value) {
  return String(Number(value.toPrecision(4)));
}
