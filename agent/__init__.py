"""The shell around the core: reads manifests, carries plans to the kernel, talks to people."""
