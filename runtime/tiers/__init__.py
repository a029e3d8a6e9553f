"""Memory of experts: the slow tier (disk or RAM), the near tier, and the slots and replicas of the
fast tier."""
