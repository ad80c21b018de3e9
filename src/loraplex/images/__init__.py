"""Host images of adapters: the store on disk, the file, the shared region, the loader process."""
