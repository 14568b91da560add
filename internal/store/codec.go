package store

import (
	"database/sql/driver"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"net/netip"
	"time"
)

// timeLayout always writes nine fractional digits: RFC3339Nano omits trailing
// zeros, and then "…05Z" sorts after "…05.1Z".
const timeLayout = "2006-01-02T15:04:05.000000000Z"

func encodeTime(t time.Time) (string, error) {
	if t.IsZero() {
		return "", nil
	}
	t = t.UTC()
	if y := t.Year(); y < 0 || y > 9999 {
		return "", fmt.Errorf("the year %d cannot be stored", y)
	}
	return t.Format(timeLayout), nil
}

func decodeTime(s string) (time.Time, error) {
	if s == "" {
		return time.Time{}, nil
	}
	t, err := time.Parse(time.RFC3339Nano, s) // parsed faster than a custom layout
	if err != nil || len(s) != len(timeLayout) || s[len(s)-1] != 'Z' || s[19] != '.' {
		return time.Time{}, fmt.Errorf("%q is not a time of this database", s)
	}
	return t, nil
}

// timeCol maps a time.Time to its column. Writing it also converts *t to the
// form in which it will be read: UTC, without a monotonic clock.
type timeCol struct{ t *time.Time }

func (c timeCol) Value() (driver.Value, error) {
	if !c.t.IsZero() {
		*c.t = c.t.UTC().Round(0)
	}
	return encodeTime(*c.t)
}

func (c timeCol) Scan(src any) error {
	s, ok := src.(string)
	if !ok {
		return fmt.Errorf("a time is stored as %T", src)
	}
	t, err := decodeTime(s)
	*c.t = t
	return err
}

// idCol maps an ID that the database assigns: 0 is written as NULL.
type idCol struct{ id *int64 }

func (c idCol) Value() (driver.Value, error) {
	if *c.id == 0 {
		return nil, nil
	}
	return *c.id, nil
}

func (c idCol) Scan(src any) error {
	id, ok := src.(int64)
	if !ok {
		return fmt.Errorf("an id is stored as %T", src)
	}
	*c.id = id
	return nil
}

// jsonCol maps a struct to a JSON column.
type jsonCol struct{ v any }

func (c jsonCol) Value() (driver.Value, error) {
	b, err := json.Marshal(c.v)
	return string(b), err
}

func (c jsonCol) Scan(src any) error {
	s, ok := src.(string)
	if !ok {
		return fmt.Errorf("JSON is stored as %T", src)
	}
	return json.Unmarshal([]byte(s), c.v)
}

// addrCol maps an address to its text; one that is not valid to ”.
type addrCol struct{ a *netip.Addr }

func (c addrCol) Value() (driver.Value, error) {
	if !c.a.IsValid() {
		return "", nil
	}
	return c.a.String(), nil
}

func (c addrCol) Scan(src any) error {
	s, ok := src.(string)
	if !ok {
		return fmt.Errorf("an address is stored as %T", src)
	}
	*c.a = netip.Addr{}
	if s == "" {
		return nil
	}
	a, err := netip.ParseAddr(s)
	*c.a = a
	return err
}

// addr4Col maps an IPv4 address to its number; one that is not valid to NULL.
type addr4Col struct{ a *netip.Addr }

func (c addr4Col) Value() (driver.Value, error) {
	switch {
	case !c.a.IsValid():
		return nil, nil
	case !c.a.Is4():
		return nil, fmt.Errorf("%s is not an IPv4 address", c.a)
	}
	return int64(number(*c.a)), nil
}

func (c addr4Col) Scan(src any) error {
	*c.a = netip.Addr{}
	if src == nil {
		return nil
	}
	n, ok := src.(int64)
	if !ok || n < 1 || n > math.MaxUint32 {
		return fmt.Errorf("an IPv4 address is stored as %T %v", src, src)
	}
	*c.a = netip.AddrFrom4([4]byte(binary.BigEndian.AppendUint32(nil, uint32(n))))
	return nil
}
