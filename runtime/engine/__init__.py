"""One layer step inside the model's own forward: see the routers, get a plan, load, compute, add
up."""
