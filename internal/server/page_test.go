package server

import (
	"fmt"
	"slices"
	"testing"
)

// TestPagedLists reads a whole list in pages of each length, while items are
// removed: no other is missed or repeated.
func TestPagedLists(t *testing.T) {
	var list []string
	for i := range 20 {
		list = append(list, fmt.Sprintf("item-%02d", i))
	}
	key := func(v string) []string { return []string{v} }
	for limit := 1; limit <= 21; limit++ {
		items, in := slices.Clone(list), PageInput{Limit: limit}
		var got []string
		for {
			page, err := pageFrom("things", items, in, key)
			if err != nil {
				t.Fatal(err)
			}
			if got = append(got, page.Items...); page.Next == "" {
				break
			}
			items = slices.DeleteFunc(items, func(v string) bool { return v == got[len(got)-1] }) // the cursor's own
			in.Cursor = page.Next
		}
		if !slices.Equal(got, list) {
			t.Errorf("pages of %d: %v", limit, got)
		}
	}
	for _, cursor := range []string{"x", cursorOf("others", "a"), cursorOf("things"), cursorOf("things", "a", "b")} {
		if _, err := pageFrom("things", list, PageInput{Limit: 1, CursorInput: CursorInput{cursor}}, key); err == nil {
			t.Errorf("cursor %q was accepted", cursor)
		}
	}
}
