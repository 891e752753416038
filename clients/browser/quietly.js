import { PenstockError } from "./penstock-client.js";

/** Ignores errors of work that may fail without harm, since the next refresh repeats it. */
export async function quietly(/** @type {() => Promise<any>} */ work) {
  try {
    await work();
  } catch (error) {
    if (!(error instanceof PenstockError)) throw error;
  }
}
