"""One process or many: the only room that knows ranks and meshes."""
