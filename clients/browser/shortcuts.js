/**
 * Keys that work anywhere on the page. They are listed in the settings dialog.
 */

/**
 * @typedef {object} Commands
 * @property {() => void} stop
 * @property {() => void} newChat
 * @property {() => void} regenerate
 * @property {() => void} copy
 * @property {() => void} toggleList
 * @property {() => void} settings
 * @property {() => void} write
 */

export function listenForShortcuts(/** @type {Commands} */ commands) {
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
    const command = event.altKey && !event.ctrlKey && !event.metaKey ? withAlt[event.code]
      : event.key === "Escape" ? commands.stop
      : event.key === "/" && !isTyping ? commands.write
      : undefined;
    if (!command) return;
    event.preventDefault();
    command();
  });
}
