/**
 * Keys that work anywhere on the page. They are listed in the settings dialog.
 */

/** Where Option with a letter types a character: on a German keyboard, Option+L is "@". */
const isApple = /^(Mac|iP)/.test(navigator.platform);

/**
 * @typedef {object} Commands
 * @property {() => void} stop
 * @property {() => void} newChat
 * @property {() => void} regenerate
 * @property {() => void} copy
 * @property {() => void} toggleList
 * @property {() => void} search
 * @property {() => void} settings
 * @property {() => void} write
 */

export function listenForShortcuts(/** @type {Commands} */ commands) {
  if (isApple) nameAppleKeys();
  // By their places on the keyboard: with Alt, some systems make other letters of them.
  /** @type {Record<string, () => void>} */ const withAlt = {
    KeyN: commands.newChat,
    KeyR: commands.regenerate,
    KeyC: commands.copy,
    KeyL: commands.toggleList,
    KeyS: commands.settings,
  };
  document.addEventListener("keydown", (event) => {
    if (document.querySelector("dialog[open]")) return;
    const isTyping = event.target instanceof HTMLElement && event.target.closest("input, textarea, select");
    const command = event.altKey && event.ctrlKey === isApple && !event.metaKey ? withAlt[event.code]
      : event.key.toLowerCase() === "k" && (isApple ? event.metaKey : event.ctrlKey) && !event.altKey && !event.shiftKey ? commands.search
      : event.key === "Escape" ? commands.stop
      : event.key === "/" && !isTyping ? commands.write
      : undefined;
    if (!command) return;
    event.preventDefault();
    command();
  });
}

function nameAppleKeys() {
  for (const node of /** @type {NodeListOf<HTMLElement>} */ (document.querySelectorAll("[title*='(Alt+']"))) {
    node.title = node.title.replace("(Alt+", "(Control+Option+");
  }
}

/** What is written on a key that others call `Alt` or `Ctrl`. */
export function keyName(/** @type {string} */ key) {
  if (!isApple) return key;
  return { Alt: "Control+Option", Ctrl: "⌘" }[key] ?? key;
}
