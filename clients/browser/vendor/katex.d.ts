/** `katex.js` is a script: it sets `self.katex`. */
export {};
