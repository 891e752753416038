import { PenstockError } from "./penstock-client.js";

/** Does what may fail without harm, as the next refresh makes up for it: nothing said of errors. */
export async function quietly(/** @type {() => Promise<any>} */ work) {
  try {
    await work();
  } catch (error) {
    if (!(error instanceof PenstockError)) throw error;
  }
}
