client { enabled = true }
