/** What the page uses of `htm-preact.js`, which comes without declarations. */
export type Child = any;
export function html(strings: TemplateStringsArray, ...values: any[]): Child;
export function h(kind: any, props: any, ...children: Child[]): Child;
export function render(child: Child, parent: Element): void;
export function useState<T>(initial: T | (() => T)): [T, (next: T | ((now: T) => T)) => void];
export function useEffect(effect: () => void | (() => void), inputs?: readonly any[]): void;
export function useLayoutEffect(effect: () => void | (() => void), inputs?: readonly any[]): void;
export function useRef<T>(initial: T | null): { current: T | null };
export class Component {
  props: any;
  base: any;
}
