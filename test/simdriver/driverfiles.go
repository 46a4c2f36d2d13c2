package simdriver

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"runtime"
	"strings"
)

// driverLibraries are libraries of a driver's installation, with the suffix of the SONAME; "" = the file's own name.
var driverLibraries = []struct{ name, soname string }{
	{"libcuda", ".1"}, {"libcudadebugger", ".1"}, {"libnvcuvid", ".1"}, {"libnvidia-cfg", ".1"}, {"libnvidia-encode", ".1"},
	{"libnvidia-glcore", ""}, {"libnvidia-ml", ".1"}, {"libnvidia-nvvm", ".4"}, {"libnvidia-opencl", ".1"}, {"libnvidia-ptxjitcompiler", ".1"},
	{"libGLX_nvidia", ".0"}, {"libEGL_nvidia", ".0"}, {"vdpau/libvdpau_nvidia", ".1"},
}

// libraries are the files of a driver's installation that containers get: libraries that can be loaded and have no function.
func (t tree) libraries(version string) {
	if version == "" {
		return
	}
	for _, l := range driverLibraries {
		file := l.name + ".so." + version
		soname := l.name + ".so" + l.soname
		if l.soname == "" {
			soname = file
		}
		t.files[libraryDir+"/"+file] = emptyLibrary(soname[strings.LastIndex(soname, "/")+1:])
	}
}

// emptyLibrary is a shared object with a SONAME and without symbols, which the dynamic linker loads and ldconfig lists.
func emptyLibrary(soname string) string {
	const (
		page      = 0x1000
		headerLen = 64
		progLen   = 56
		sectLen   = 64
		symbolLen = 24
		programs  = 2 // PT_LOAD of the whole file, PT_DYNAMIC
	)
	machine := elf.EM_X86_64
	if runtime.GOARCH == "arm64" {
		machine = elf.EM_AARCH64
	}
	names := "\x00" + soname + "\x00"
	names += strings.Repeat("\x00", -len(names)&7)
	symbols := uint64(headerLen + programs*progLen)
	hash := symbols + symbolLen
	dynstr := hash + 16 + 8 // one bucket, one symbol; aligned
	dynamic := dynstr + uint64(len(names))
	entries := []elf.Dyn64{
		{Tag: int64(elf.DT_SONAME), Val: 1}, {Tag: int64(elf.DT_HASH), Val: hash}, {Tag: int64(elf.DT_STRTAB), Val: dynstr},
		{Tag: int64(elf.DT_SYMTAB), Val: symbols}, {Tag: int64(elf.DT_STRSZ), Val: uint64(len(names))}, {Tag: int64(elf.DT_SYMENT), Val: symbolLen}, {},
	}
	dynamicLen := uint64(len(entries) * 16)
	sections := dynamic + dynamicLen
	total := sections + 3*sectLen

	h := elf.Header64{
		Type: uint16(elf.ET_DYN), Machine: uint16(machine), Version: 1, Phoff: headerLen, Shoff: sections,
		Ehsize: headerLen, Phentsize: progLen, Phnum: programs, Shentsize: sectLen, Shnum: 3,
	}
	copy(h.Ident[:], elf.ELFMAG)
	h.Ident[elf.EI_CLASS], h.Ident[elf.EI_DATA], h.Ident[elf.EI_VERSION] = byte(elf.ELFCLASS64), byte(elf.ELFDATA2LSB), 1
	var b bytes.Buffer
	for _, part := range []any{
		h,
		elf.Prog64{Type: uint32(elf.PT_LOAD), Flags: uint32(elf.PF_R | elf.PF_W), Filesz: total, Memsz: total, Align: page},
		elf.Prog64{
			Type: uint32(elf.PT_DYNAMIC), Flags: uint32(elf.PF_R | elf.PF_W), Off: dynamic, Vaddr: dynamic, Paddr: dynamic,
			Filesz: dynamicLen, Memsz: dynamicLen, Align: 8,
		},
		elf.Sym64{},
		[]uint32{1, 1, 0, 0, 0, 0},
		[]byte(names),
		entries,
		elf.Section64{},
		elf.Section64{Type: uint32(elf.SHT_STRTAB), Flags: uint64(elf.SHF_ALLOC), Addr: dynstr, Off: dynstr, Size: uint64(len(names)), Addralign: 1},
		elf.Section64{
			Type: uint32(elf.SHT_DYNAMIC), Flags: uint64(elf.SHF_ALLOC), Addr: dynamic, Off: dynamic, Size: dynamicLen, Link: 1, Addralign: 8, Entsize: 16,
		},
	} {
		_ = binary.Write(&b, binary.LittleEndian, part) // a buffer takes all
	}
	return b.String()
}

// WriteDriverFiles writes the libraries of a driver's installation under a root, without a machine.
func WriteDriverFiles(root, version string) error {
	t := tree{files: map[string]string{}}
	t.libraries(version)
	return t.write(root)
}
