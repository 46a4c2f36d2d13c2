package statefile

import "syscall"

// Identity distinguishes a file from the next one of the same name. Inode numbers are reused immediately, so the modification time is part
// of it. The zero value means that there is no file.
type Identity struct {
	dev, ino uint64
	size     int64
	modified syscall.Timespec
}

// IdentityOf returns the identity of the file that is at a path now. It follows symbolic links.
func IdentityOf(path string) Identity {
	var st syscall.Stat_t
	if syscall.Stat(path, &st) != nil {
		return Identity{}
	}
	return Identity{st.Dev, st.Ino, st.Size, st.Mtim}
}
