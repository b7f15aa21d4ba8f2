"""Build the page of a release that is tested on user traffic: the evidence so far, and the result."""
