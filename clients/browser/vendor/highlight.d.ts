/** What the page uses of `highlight.js`, which comes without declarations. */
export interface Scope { scope?: string; children: (Scope | string)[] }
declare const hljs: {
  getLanguage(name: string): { name: string } | undefined;
  highlight(code: string, options: { language: string; ignoreIllegals?: boolean }): { _emitter: { rootNode: Scope } };
};
export default hljs;
