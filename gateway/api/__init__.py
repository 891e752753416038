"""One folder or file per API: routes, types of requests, answers; beside them what they share."""
