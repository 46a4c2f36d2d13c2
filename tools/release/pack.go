package main

import (
	"archive/tar"
	"archive/zip"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// entry is a file of an archive.
type entry struct {
	name, path string
	mode       fs.FileMode
	size       int64
}

// packCommand packs the content of a folder into a .tar.gz or .zip. Order, times, owner and modes depend on the content alone.
func packCommand(_ context.Context, args []string) error {
	if len(args) != 3 {
		return errors.New("want FOLDER OUTPUT EPOCH")
	}
	seconds, err := strconv.ParseInt(args[2], 10, 64)
	if err != nil {
		return fmt.Errorf("EPOCH: %w", err)
	}
	entries, err := entriesOf(args[0])
	if err != nil {
		return err
	}
	write := writeTarGz
	if strings.HasSuffix(args[1], ".zip") {
		write = writeZip
	}
	file, err := os.Create(args[1])
	if err != nil {
		return err
	}
	if err := errors.Join(write(file, entries, time.Unix(seconds, 0).UTC()), file.Close()); err != nil {
		return errors.Join(fmt.Errorf("%s: %w", args[1], err), os.Remove(args[1]))
	}
	return nil
}

// entriesOf lists the files of a folder by name. What the owner can execute is 0755, all else 0644.
func entriesOf(folder string) ([]entry, error) {
	var entries []entry
	err := filepath.WalkDir(folder, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		if !info.Mode().IsRegular() {
			return fmt.Errorf("%s: %s, want a file", path, info.Mode().Type())
		}
		name, err := filepath.Rel(folder, path)
		mode := fs.FileMode(0o644)
		if info.Mode()&0o100 != 0 {
			mode = 0o755
		}
		entries = append(entries, entry{filepath.ToSlash(name), path, mode, info.Size()})
		return err
	})
	if err == nil && len(entries) == 0 {
		err = fmt.Errorf("%s: no files", folder)
	}
	return entries, err
}

func writeTarGz(w io.Writer, entries []entry, at time.Time) error {
	compressed, err := gzip.NewWriterLevel(w, gzip.BestCompression)
	if err != nil {
		return err
	}
	archive := tar.NewWriter(compressed)
	for _, e := range entries {
		header := &tar.Header{Name: e.name, Mode: int64(e.mode), Size: e.size, ModTime: at, Format: tar.FormatUSTAR}
		if err := errors.Join(archive.WriteHeader(header), copyFile(archive, e.path)); err != nil {
			return err
		}
	}
	return errors.Join(archive.Close(), compressed.Close())
}

func writeZip(w io.Writer, entries []entry, at time.Time) error {
	archive := zip.NewWriter(w)
	for _, e := range entries {
		header := &zip.FileHeader{Name: e.name, Method: zip.Deflate, Modified: at}
		header.SetMode(e.mode)
		part, err := archive.CreateHeader(header)
		if err == nil {
			err = copyFile(part, e.path)
		}
		if err != nil {
			return err
		}
	}
	return archive.Close()
}

func copyFile(w io.Writer, path string) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	_, err = io.Copy(w, file)
	return errors.Join(err, file.Close())
}
