"""What a plan decides besides its ranks and mesh, one file each: as asked or chosen, or why it cannot be."""
