package simdriver

import (
	"context"
	"fmt"
	"os"
	"strconv"
)

// SetDriver replaces the kernel driver by another version: sessions of the old
// one are over, and a process that has the old library mapped gets
// LIB_RM_VERSION_MISMATCH when it initialises again.
func (m *Machine) SetDriver(version string) error {
	return m.edit(func(c *conf) error {
		if err := c.set("machine", "driver", version); err != nil {
			return err
		}
		return bump(c)
	})
}

// SetLibrary replaces the library on disk by another version without touching
// the kernel driver, as a package upgrade does: sessions go on, new processes
// get LIB_RM_VERSION_MISMATCH until SetDriver says the same version.
func (m *Machine) SetLibrary(version string) error {
	return m.edit(func(c *conf) error { return c.set("machine", "library", version) })
}

// Unload takes the kernel driver away: sessions end with DRIVER_NOT_LOADED,
// the driver's files under /proc and /dev go, system event sets hear of the unbinding.
func (m *Machine) Unload() error { return m.load("no", systemUnbind) }

// Load brings the kernel driver back; handles from before stay invalid.
func (m *Machine) Load() error { return m.load("yes", systemBind) }

func (m *Machine) load(loaded string, event int) error {
	var addresses []string
	err := m.edit(func(c *conf) error {
		for _, s := range c.slots() {
			addresses = append(addresses, c.gpuGet(s, "pci"))
		}
		if err := c.set("machine", "loaded", loaded); err != nil {
			return err
		}
		return bump(c)
	})
	if err != nil {
		return err
	}
	for _, pci := range addresses {
		if err := m.bindingOf(pci, event); err != nil {
			return err
		}
	}
	return nil
}

// bindingOf raises a system event about the GPU at a PCI address.
func (m *Machine) bindingOf(pci string, event int) error {
	var domain, bus, dev uint32
	if _, err := fmt.Sscanf(pci, "%x:%x:%x", &domain, &bus, &dev); err != nil {
		return fmt.Errorf("pci %q: %w", pci, err)
	}
	return m.appendEvent(fmt.Sprintf("system %#x %d", event, domain<<16|bus<<8|dev))
}

// Reboot restarts the machine: another boot id, another incarnation of the driver, every GPU reset.
func (m *Machine) Reboot() error {
	slots, err := m.Slots()
	if err != nil {
		return err
	}
	for _, slot := range slots {
		if err := m.Reset(slot); err != nil {
			return err
		}
	}
	return m.edit(func(c *conf) error {
		old, _ := c.get("machine", "boots")
		if err := c.set("machine", "boots", strconv.FormatUint(number(old)+1, 10)); err != nil {
			return err
		}
		return bump(c)
	})
}

// bump starts another incarnation of the kernel driver.
func bump(c *conf) error {
	old, _ := c.get("machine", "incarnation")
	return c.set("machine", "incarnation", strconv.FormatUint(number(old)+1, 10))
}

// Hide takes the library file away, Unhide brings it back. A process that has
// loaded the library keeps it, as with any library.
func (m *Machine) Hide() error { return os.Rename(m.libraryPath(), m.libraryPath()+".hidden") }

// Unhide is Hide undone.
func (m *Machine) Unhide() error { return os.Rename(m.libraryPath()+".hidden", m.libraryPath()) }

func (m *Machine) libraryPath() string { return m.path(libraryDir, LibraryName) }

// Without builds the machine's library anew with exported functions left out,
// as an older driver lacks them. Processes that have it loaded keep theirs.
func (m *Machine) Without(ctx context.Context, symbols ...string) error {
	_, err := Build(ctx, m.path(libraryDir), WithoutSymbols(symbols...))
	return err
}
