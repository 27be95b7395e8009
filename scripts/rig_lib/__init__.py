"""What scripts/rig is made of; standard library only, so that it runs on a bare Debian machine."""
