/**
 * Keeps a scroller at its end while content grows, once it was asked to, and lets go as soon as the
 * reader scrolls up. Scrolling back to the end takes hold again.
 */

const NEAR_END_PX = 24;

export class StickyScroll {
  isFollowing = false;
  #scroller;
  #onChange;
  #lastTop = 0;

  /**
   * @param {HTMLElement} scroller
   * @param {HTMLElement} content  the one child whose height changes
   * @param {(isFollowing: boolean) => void} onChange
   */
  constructor(scroller, content, onChange) {
    this.#scroller = scroller;
    this.#onChange = onChange;
    scroller.addEventListener("scroll", () => this.#noteScroll(), { passive: true });
    const observer = new ResizeObserver(() => this.#settle());
    observer.observe(content);
    observer.observe(scroller);
  }

  /** Goes to the end and stays there. */
  follow() {
    this.#set(true);
    this.#settle();
  }

  /** Goes to the beginning and stays there. */
  toTop() {
    this.#scroller.scrollTop = this.#lastTop = 0;
    this.#set(false);
  }

  /** Stays where it is. */
  letGo() {
    this.#set(false);
  }

  #settle() {
    if (this.isFollowing) this.#scroller.scrollTop = this.#scroller.scrollHeight;
    this.#lastTop = this.#scroller.scrollTop;
  }

  #noteScroll() {
    const { scrollTop, scrollHeight, clientHeight } = this.#scroller;
    const isNearEnd = scrollHeight - clientHeight - scrollTop <= NEAR_END_PX;
    // Growing content also moves the end away; only a move upwards is the reader's.
    if (isNearEnd) this.#set(true);
    else if (scrollTop < this.#lastTop - 1) this.#set(false);
    this.#lastTop = scrollTop;
  }

  #set(/** @type {boolean} */ isFollowing) {
    if (isFollowing === this.isFollowing) return;
    this.isFollowing = isFollowing;
    this.#onChange(isFollowing);
  }
}
