package main

import (
	"debug/elf"
	"debug/gosym"
	"encoding/binary"
	"errors"
)

// symbols are the functions of a Go binary. They are from the table that the Go runtime itself uses, which a stripped binary has as well,
// so what is measured is the binary that is released.
type symbols struct {
	path     string
	segments []elf.ProgHeader // those in memory
	table    *gosym.Table
}

// goSymbols reads those of the binary at path, which samples have as name; an error if it is not Go's.
func goSymbols(path, name string) (*symbols, error) {
	file, err := elf.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	functions, text := file.Section(".gopclntab"), file.Section(".text")
	if functions == nil || text == nil {
		return nil, errors.New("no Go functions")
	}
	data, err := functions.Data()
	if err != nil {
		return nil, err
	}
	start := text.Addr
	if at := textStart(file, data); at != 0 {
		start = at // C has code before it
	}
	s := &symbols{path: name}
	for _, p := range file.Progs {
		if p.Type == elf.PT_LOAD {
			s.segments = append(s.segments, p.ProgHeader)
		}
	}
	if s.table, err = gosym.NewTable(nil, gosym.NewLineTable(data, start)); err != nil {
		return nil, err
	}
	return s, nil
}

// textStart is the address of the first Go function: Go 1.26 and newer have it in the runtime's moduledata, older versions at the
// start of the function table. 0: it is not in the file. 64-bit little-endian.
func textStart(file *elf.File, functions []byte) uint64 {
	const inModuledata, inTable = 22 * 8, 3 * 8 // runtime.moduledata.text, runtime.pcHeader.textStart
	table, offset := functions, inTable
	if module := file.Section(".go.module"); module != nil {
		table, _ = module.Data()
		offset = inModuledata
	}
	if len(table) < offset+8 {
		return 0
	}
	return binary.LittleEndian.Uint64(table[offset:])
}

// name is the function of a frame, with the path of its package; "" if it is none of the binary.
func (s *symbols) name(f frame) string {
	if f.kernel() || f.file != s.path {
		return ""
	}
	for _, segment := range s.segments {
		if f.address < segment.Off || f.address >= segment.Off+segment.Filesz {
			continue
		}
		if fn := s.table.PCToFunc(f.address - segment.Off + segment.Vaddr); fn != nil {
			return fn.Name
		}
	}
	if f.symbol == "[unknown]" {
		return ""
	}
	return f.symbol
}
