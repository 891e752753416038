"""Images in prompts: files, the tokens that stand for them, towers that compute their features, and
the requests that wait for one."""
