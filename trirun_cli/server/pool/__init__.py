"""Several models behind one server: which of them are loaded, and which requests wait for one."""
