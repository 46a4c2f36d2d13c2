package simdriver

import (
	"errors"
	"fmt"
	"strconv"
)

// SetDriver replaces the whole driver by another version, library and kernel module, as an upgrade does:
// sessions of the old one are over, a process that has the old library mapped gets LIB_RM_VERSION_MISMATCH
// when it initialises again, and a new process works.
func (m *Machine) SetDriver(version string) error {
	if err := m.ReplaceLibrary(version); err != nil {
		return err
	}
	return m.SetModule(version)
}

// SetModule replaces the kernel module alone: sessions of the old one are over, and every process gets
// LIB_RM_VERSION_MISMATCH until ReplaceLibrary has the same version.
func (m *Machine) SetModule(version string) error {
	return m.edit(func(c *conf) error {
		if _, ok := c.get("machine", "library"); !ok {
			old, _ := c.get("machine", "driver")
			if err := c.set("machine", "library", old); err != nil {
				return err
			}
		}
		if err := c.set("machine", "driver", version); err != nil {
			return err
		}
		return bump(c)
	})
}

// Unload unloads the kernel driver also while processes use it, which no kernel does (see TryUnload): sessions end with
// DRIVER_NOT_LOADED, the driver's files under /proc and /dev are removed, system event sets get the unbinding.
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
	return m.edit(func(c *conf) error { return errors.Join(c.increment("boots"), bump(c)) })
}

// bump starts another incarnation of the kernel driver.
func bump(c *conf) error { return c.increment("incarnation") }

// increment adds 1 to a number of the machine.
func (c *conf) increment(key string) error {
	old, _ := c.get("machine", key)
	return c.set("machine", key, strconv.FormatUint(number(old)+1, 10))
}
